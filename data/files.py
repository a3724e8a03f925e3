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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from errors import DataError

UNFINISHED = ".unfinished"  # the ending of a name that something is being written under
_BLOCK = 1 << 18  # bytes read at a time
_BINARY_PROBE = 8192  # a NUL byte this early means a file is not text


def find_files(path: str) -> list[Path]:
    """Return the sorted files that data.path means: a file, a folder's at any depth, or a glob's.

    Hidden files and folders inside a folder are left out. Raises DataError when none is found or one is unreadable.
    """
    try:
        root = Path(path).expanduser()
        names = glob.glob(str(root), recursive=True)  # noqa: PTH207  (Path.glob refuses absolute patterns)
        globbed = sorted(file for file in map(Path, names) if file.is_file())
        files = walk(root) if root.is_dir() else [root] if root.exists() else globbed
    except (OSError, RuntimeError) as error:  # a closed parent folder, or no such user
        raise DataError(f"data.path={path} cannot be read ({error}): change its permissions or the path.") from error
    if not files:
        what = "is a folder without files" if root.is_dir() else f"does not exist (seen from {Path.cwd()})"
        raise DataError(f"data.path={path} {what}: give a file, a folder or a quoted glob that holds text.")
    for file in files:
        if not file.is_file() or not os.access(file, os.R_OK):
            raise DataError(f"data.path={path}: {file} is not a readable file: change its permissions or the path.")
    return files


def walk(root: Path, skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    """Return all files below `root`, sorted, without hidden ones and those in `skipped_folders`."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): change its permissions or data.path.")

    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())


def fingerprint(files: list[Path], *extra: str) -> str:
    """Return a hex string that changes with any file's path, size or time of change. Contents are not read."""
    digest = hashlib.sha256("\0".join(extra).encode())
    for file in files:
        status = file.stat()
        digest.update(f"\0{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


@contextmanager
def reading(file: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Open a file's bytes, unpacked when its name ends in .gz. Raises DataError when they cannot be read."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data.path: {file} cannot be read ({error}): mend it or leave it out.") from error


def text_blocks(file: Path, *, refuse_binary: bool) -> Iterator[str]:
    """Yield a file's text in blocks of bounded size, with U+FFFD for bytes that are not UTF-8.

    A binary file raises DataError with `refuse_binary`, and yields nothing without.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with reading(file) as stream:
        block = stream.read(_BLOCK)
        if b"\0" in block[:_BINARY_PROBE]:
            if refuse_binary:
                raise DataError(f"data.path={file} is a binary file (it has NUL bytes): give text in UTF-8.")
            return
        while block:
            yield decoder.decode(block)
            block = stream.read(_BLOCK)
    yield decoder.decode(b"", final=True)


def json_records(lines: Iterable[bytes], source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of JSON lines with where it is, "SOURCE line 3"; empty lines are passed over.

    Raises DataError for a line that is no JSON object.
    """
    for number, line in enumerate(lines, start=1):
        where, text = f"{source} line {number}", line.decode("utf-8", "replace").removeprefix("\ufeff").strip()
        if not text:
            continue
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


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Make a file or folder outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
