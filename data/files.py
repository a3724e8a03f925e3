"""Files on disk: find a text's files, notice when they change, read them in blocks, replace files atomically."""

import codecs
import glob
import gzip
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from errors import DataError

UNFINISHED = ".unfinished"  # the ending of a name that something is being written under
_BLOCK = 1 << 18  # bytes read at a time
_BINARY_PROBE = 8192  # a NUL byte this early means a file is not text


class Source(NamedTuple):
    """A file of text as it was found."""

    path: str
    size: int
    changed: int  # nanoseconds


def find_files(path: str) -> list[Source]:
    """Return the sorted files that data.path means: a file, a folder's at any depth, or a glob's.

    Hidden files and folders inside a folder are left out. Raises DataError when none is found or one is no file.
    """
    try:
        root = Path(path).expanduser()
        if root.is_dir():
            files = walk(root)
        else:
            # PTH207: Path.glob refuses absolute patterns.
            names = map(Path, glob.glob(str(root), recursive=True))  # noqa: PTH207
            found = [root] if root.exists() else filter(Path.is_file, names)
            files = [Source(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in found]
            files.sort(key=_parts)
    except (OSError, RuntimeError) as error:  # a closed parent folder, or no such user
        raise DataError(f"data.path={path} cannot be read ({error}): change its permissions or the path.") from error
    if not files:
        what = "is a folder without files" if root.is_dir() else f"does not exist (seen from {Path.cwd()})"
        raise DataError(f"data.path={path} {what}: give a file, a folder or a quoted glob that holds text.")
    if files[0].path == str(root) and not root.is_file():
        raise DataError(f"data.path={path}: {root} is not a readable file: change its permissions or the path.")
    return files


def walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Source]:
    """Return all files below `root`, sorted, without hidden files and folders and those named in `skipped`.

    A file costs one call of the system and no Path: folders of 200,000 are read at every start.
    """
    files, folders = [], [str(root)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name in skipped:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file():
                        status = entry.stat()
                        files.append(Source(entry.path.removeprefix("./"), status.st_size, status.st_mtime_ns))
        except OSError as error:
            why = f"{error.filename} cannot be read ({error.strerror})"
            raise DataError(f"{why}: change its permissions or data.path.") from error
    return sorted(files, key=_parts)


def _parts(file: Source) -> str:
    """Return a key that sorts as Path does, part by part: a/b before a-b."""
    return file.path.replace("/", "\0")


def fingerprint(files: list[Source], *extra: str) -> str:
    """Return a hex string that changes with any file's path, size or time of change. Contents are not read."""
    here = f"{Path.cwd()}/"
    found = (f"\0{'' if path.startswith('/') else here}{path}\0{size}\0{changed}" for path, size, changed in files)
    content = "\0".join(extra) + "".join(found)
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]


@contextmanager
def reading(file: str) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Open a file's bytes, unpacked when its name ends in .gz. Raises DataError when they cannot be read."""
    try:
        with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as stream:  # noqa: PTH123
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data.path: {file} cannot be read ({error}): mend it or leave it out.") from error


Losses = dict[str, int]
"""What reading has changed: to each file's name how many of its characters were not UTF-8; 0 for a binary file, which
is left out."""


def text_blocks(file: str, losses: Losses, *, refuse_binary: bool) -> Iterator[str]:
    """Yield a file's text in blocks of bounded size, without a BOM, with U+FFFD for bytes that are not UTF-8.

    A file that is mostly such bytes raises DataError. So does a binary one with `refuse_binary`; without it yields
    nothing.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    size = lost = 0
    before = b""
    with reading(file) as stream:
        for block in chain(iter(partial(stream.read, _BLOCK), b""), [b""]):  # the last one ends the decoder's
            if not size and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"data.path: {file} is UTF-16: convert it to UTF-8 (iconv) or leave it out.")
            if not size and b"\0" in block[:_BINARY_PROBE]:
                if refuse_binary:
                    raise DataError(f"data.path={file} is a binary file (it has NUL bytes): give text in UTF-8.")
                losses[file] = 0
                return
            text = decoder.decode(block, final=not block)
            size, lost = size + len(text), lost + _lost(text, before + block)
            before = block[-2:]
            yield text
    if lost:
        losses[file] = lost
    if 2 * lost > size:
        why = f"{lost:,} of its {size:,} characters cannot be read"
        raise DataError(f"data.path: {file} is not UTF-8 ({why}): convert it, e.g. with iconv, or leave it out.")


def _lost(text: str, content: bytes) -> int:
    """Count the U+FFFD of a text that its bytes do not have."""
    return text.count("\ufffd") - content.count(b"\xef\xbf\xbd")


def json_records(
    lines: Iterable[bytes], source: str, losses: Losses | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of JSON lines with where it is, "SOURCE line 3"; empty lines are passed over.

    Raises DataError for a line that is no JSON object.
    """
    lost = 0
    for number, line in enumerate(lines, start=1):
        where, text = f"{source} line {number}", line.decode("utf-8", "replace").removeprefix("\ufeff").strip()
        if not text:
            continue
        if losses is not None and (lost := lost + _lost(text, line)):
            losses[source] = lost
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error}): mend it or leave it out.") from error
        if not isinstance(record, dict):
            raise DataError(f"{where} is not a JSON object: write each line as {{...}}.")
        yield where, record


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` for a new file or folder, which takes the place of `path` at the end.

    Everything is flushed to disk, then renamed in one step: a reader, a kill or a power cut finds the old one or the
    new one. If the body raises, the old one stays as it was and nothing else is left.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield unfinished
        for written in [*unfinished.rglob("*"), unfinished]:
            flush_to_disk(written)
        unfinished.replace(path)
        flush_to_disk(path.parent)
    except BaseException:
        remove(unfinished)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 in place of a file; halves of characters become question marks."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="replace")


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there and can be deleted: cleaning up never raises."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Make a file or folder outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
