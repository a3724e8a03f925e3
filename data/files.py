"""Files on disk: finding those of a text, telling when they changed, reading them piece by piece; making ours last."""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from errors import DataError

_BLOCK = 1 << 18  # bytes read at a time
UNFINISHED = ".unfinished"  # how the names of what is being written end
_BINARY_PROBE = 8192  # a NUL byte this early means a file is not text


def find_files(path: str) -> list[Path]:
    """The files that data.path means, sorted: a file, those of a folder at any depth, or a glob's.

    Hidden files and folders inside a folder are left out. DataError when there are none.
    """
    try:
        root = Path(path).expanduser()
        is_folder, exists = root.is_dir(), root.exists()
    except (OSError, RuntimeError) as error:  # a folder above it is closed, or no such user
        raise DataError(f"data.path={path} cannot be read ({error}): change its permissions or the path.") from error
    if is_folder:
        files = walk(root)
    elif exists:
        files = [root]
    else:
        names = glob.glob(str(root), recursive=True)  # noqa: PTH207  (Path.glob refuses absolute patterns)
        files = sorted(file for file in map(Path, names) if file.is_file())
    if not files:
        what = "is a folder without files" if is_folder else f"does not exist (seen from {Path.cwd()})"
        raise DataError(f"data.path={path} {what}: give a file, a folder or a quoted glob that holds text.")
    for file in files:
        if not file.is_file() or not os.access(file, os.R_OK):
            raise DataError(
                f"data.path={path}: {file} cannot be read as a file, so change its permissions or the path."
            )
    return files


def walk(root: Path, skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    """All files below `root`, sorted by name, without hidden ones and those in `skipped_folders`."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): change its permissions or data.path.")

    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())


def fingerprint(files: list[Path], *extra: str) -> str:
    """A hex string that changes when a file's place, size or time of change does; contents are not read."""
    digest = hashlib.sha256("\0".join(extra).encode())
    for file in files:
        status = file.stat()
        digest.update(f"\0{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def total_size(files: list[Path]) -> int | None:
    """Bytes of text in the files; None where some are packed, so that nobody knows before reading."""
    return None if any(file.suffix == ".gz" for file in files) else sum(file.stat().st_size for file in files)


@contextmanager
def reading(file: Path) -> Iterator:
    """The file's bytes, unpacked when its name ends in .gz; DataError when they cannot be read."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        remedy = "give an undamaged copy or leave it out of data.path"
        raise DataError(f"data.path: {file} cannot be read ({error}): {remedy}.") from error


def text_blocks(file: Path, *, name_binary: bool) -> Iterator[str]:
    """A file's text in blocks of bounded size; bytes that are no UTF-8 become U+FFFD.

    A binary file gives nothing or, where `name_binary` says that it was asked for, a DataError.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with reading(file) as stream:
        block = stream.read(_BLOCK)
        if b"\0" in block[:_BINARY_PROBE]:
            if name_binary:
                raise DataError(f"data.path={file} is a binary file (it has NUL bytes): give text in UTF-8.")
            return
        while block:
            yield decoder.decode(block)
            block = stream.read(_BLOCK)
    yield decoder.decode(b"", final=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write a file or a folder under; at the end it takes the place of `path`.

    That is one step, after everything is on the disk: a reader, a kill or a power cut finds the old one or the new
    one. Whatever is raised within leaves the old one as it was, and nothing else.
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
