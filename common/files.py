"""Files and folders that are replaced in one step: whole or absent, whatever ends the process."""

import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import IO, Any, get_args, get_origin

from filelock import lock_descriptor  # flock, or LockFileEx on Windows

from common.errors import SettingsError, os_error_reason

UNFINISHED = ".unfinished"  # ends the name of what is being written
LARGEST = 1 << 28
"""Bytes of the largest foreign file that is read whole; published tokenizer.json files take up to 35 MB."""


def user_path(setting: str, path: str) -> Path:
    """Return the path that a setting gives, with ~ expanded; it need not exist.

    Raises SettingsError where ~NAME is no user, and where the system cannot look: for a name that is too long, links
    in a loop, a closed folder on the way.
    """
    try:
        place = Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(f"{setting}={path} names no user of this machine", "write the folder out") from None
    missing = suppress(FileNotFoundError, NotADirectoryError)
    with os_errors_named(setting, path, "used", "name another place"), missing:
        place.stat()
    return place


@contextmanager
def os_errors_named(
    setting: str, path: object, verb: str, remedy: str, without_folder: str | None = None
) -> Iterator[None]:
    """Turn an OSError within into a SettingsError: SETTING=PATH cannot be VERB (reason): REMEDY.

    without_folder: the remedy if a folder on the way is missing. A broken pipe is that of what is printed meanwhile.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if without_folder and isinstance(error, FileNotFoundError):
            remedy = without_folder
        raise SettingsError(f"{setting}={path} cannot be {verb} ({os_error_reason(error)})", remedy) from None


def reading(setting: str, path: str) -> AbstractContextManager[None]:
    """Turn an OSError while SETTING=PATH is read into a SettingsError."""
    return os_errors_named(setting, path, "read", "give one that exists and that you may read")


def regular(path: Path) -> Path:
    """Return `path`; raises OSError unless it is a regular file, for a FIFO or a device could be read forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")
    return path


def read_foreign(path: Path) -> bytes:
    """Return the content of a file that others wrote; raises OSError if it is not regular or over LARGEST bytes."""
    with regular(path).open("rb") as file:
        content = file.read(LARGEST + 1)  # the size of a file in /proc is said to be 0
    if len(content) > LARGEST:
        raise OSError(f"larger than {LARGEST >> 20} MB")
    return content


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` for a new file or folder, which replaces `path` atomically at the end.

    Everything is flushed to disk, then renamed in one step: a reader, a kill or a power cut finds the old one or the
    new one. If the body raises, the old one stays and the new one is removed.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield unfinished
        for written in [*unfinished.rglob("*"), unfinished]:
            flush_to_disk(written)
        for wait in (0.01, 0.1, 1, 0):  # Windows renames nothing that a virus scanner has open
            try:
                unfinished.replace(path)
                break
            except PermissionError:
                if not wait:
                    raise
                time.sleep(wait)
        flush_to_disk(path.parent)
    except BaseException:
        remove(unfinished)
        raise


@contextmanager
def writing(setting: str, path: str) -> Iterator[Path]:
    """Yield a temporary name for the file or folder SETTING=PATH, which replaces it atomically at the end.

    A link is followed, wherever it leads; a pipe or a device is written itself. An OSError, at once or in the body,
    becomes a SettingsError.
    """
    place = user_path(setting, path)
    with os_errors_named(setting, path, "written", "name another place", without_folder="make its folder first"):
        if place.is_dir():
            raise IsADirectoryError("Is a directory")
        if place.exists() and not place.is_file():
            yield place
            return
        with replacing(Path(os.path.realpath(place))) as unfinished:
            unfinished.touch()  # what cannot be written is refused before the work
            unfinished.unlink()
            yield unfinished


def replace_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 in place of a file; halves of characters become question marks."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="replace")


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there and can be deleted: cleaning up never raises."""
    shutil.rmtree(path, ignore_errors=True)  # of a folder; a link to one is left to the next line
    with suppress(OSError):
        path.unlink()


def lock(file: Path, wait: float = 0.2, mode: str = "a") -> IO[str]:
    """Return an open file whose lock this process holds until it is closed, or the process ends.

    wait: seconds for those that only ask, which hold the lock for an instant. mode: of opening the file. Raises
    BlockingIOError if another process still holds the lock then.
    """
    held = file.open(mode)
    until = time.monotonic() + wait
    while not lock_descriptor(held.fileno(), blocking=False):
        if time.monotonic() > until:
            held.close()
            raise BlockingIOError(f"{file} is locked")
        time.sleep(0.01)
    return held


def is_locked(file: Path) -> bool:
    """Return whether a living process holds the lock of a file, which may belong to somebody else."""
    try:
        if file.is_file():  # opening a fifo would wait
            lock(file, 0.05, "a" if os.access(file, os.W_OK) else "r").close()
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def point(link: Path, target: str) -> None:
    """Make `link` name its neighbour `target`: a symbolic link, or a small text file where there can be none.

    Windows demands a privilege for links, and cannot replace one to a folder in one step.
    """
    if link.is_dir() and not link.is_symlink():  # a tool that follows links has copied the run
        remove(link)
    with replacing(link) as unfinished:
        with suppress(OSError):
            if os.name != "nt":
                return unfinished.symlink_to(target)
        unfinished.write_text(target, encoding="utf-8")


def pointed(link: Path) -> Path:
    """Return the folder that `link` names, whichever way point() made it; `link` itself if it names none."""
    with suppress(OSError, ValueError):  # it is no regular file, or its text no UTF-8 or no name
        target = link.with_name(read_foreign(link).decode().strip())
        link = target if target.is_dir() else link
    return link.resolve()


def from_json(kind: Any, content: Any, name: str = "it") -> Any:
    """Return decoded JSON as `kind`, a dataclass or a type; ValueError, with the field's name, for another type.

    TypeError for a field that is missing or unknown.
    """
    if is_dataclass(kind) and isinstance(content, dict):
        hints = {field.name: field.type for field in fields(kind)}
        given = {name: from_json(hints.get(name, Any), value, name) for name, value in content.items()}
        return kind(**given)  # type: ignore[operator]
    if not is_of(content, kind):
        raise ValueError(f"{name} is {content!r:.40}, not {getattr(kind, '__name__', kind)}")
    if type(content) is int and float in (kind, *get_args(kind)):
        return float(content)  # torch takes no int over 64 bits
    return content


def is_of(value: Any, hint: Any) -> bool:
    """Return whether a decoded JSON value has the type of an annotation; a float may be 1."""
    kind = get_origin(hint)
    if kind is UnionType:
        return any(is_of(value, one) for one in get_args(hint))
    if kind in (list, dict) and type(value) is kind:
        items = value if kind is list else value.values()
        return all(is_of(item, get_args(hint)[-1]) for item in items)
    return hint is Any or type(value) is hint or (hint is float and type(value) is int and abs(value) < 1e308)


def flush_to_disk(path: Path) -> None:
    """Make a file or folder outlast a power cut."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows flushes open files to write
    except PermissionError:
        if is_folder:  # Windows opens no folders, and needs no flush of them
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
