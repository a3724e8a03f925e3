"""Files and folders that are replaced in one step: whole or absent, whatever ends the process."""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from errors import SettingsError, why

UNFINISHED = ".unfinished"  # the ending of a name that something is being written under


def user_path(setting: str, path: str) -> Path:
    """Return the path that a setting gives, with ~ expanded. Raises SettingsError where ~NAME is no user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(f"{setting}={path} names no user of this machine", "write the folder out") from None


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


@contextmanager
def writing(setting: str, path: str) -> Iterator[Path]:
    """Yield a name for the new file or folder that SETTING=PATH asks for, which takes its place at the end.

    A link is followed, wherever it leads; a pipe or a device is written itself. What the system refuses, at once or in
    the body, raises SettingsError.
    """
    place = user_path(setting, path)
    try:
        if place.is_dir():
            raise IsADirectoryError("Is a directory")
        if place.exists() and not place.is_file():
            yield place
            return
        with replacing(Path(os.path.realpath(place))) as unfinished:
            unfinished.touch()  # what cannot be written is refused before the work
            unfinished.unlink()
            yield unfinished
    except BrokenPipeError:  # of what is printed meanwhile
        raise
    except OSError as error:
        raise SettingsError(f"{setting}={path} cannot be written ({why(error)})", "name another place") from None


def replace_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 in place of a file; halves of characters become question marks."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="replace")


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there and can be deleted: cleaning up never raises."""
    shutil.rmtree(path, ignore_errors=True)  # of a folder; a link to one is left to the next line
    with suppress(OSError):
        path.unlink()


def lock(file: Path, wait: float = 0.2) -> TextIO:
    """Return an open file whose lock this process holds until it is closed.

    wait: seconds for those that only ask, which share the lock for an instant. Raises BlockingIOError where another
    process still has it then.
    """
    held, until = file.open("a"), time.monotonic() + wait
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return held
        except BlockingIOError:
            if time.monotonic() > until:
                held.close()
                raise
            time.sleep(0.01)


def is_locked(file: Path) -> bool:
    """Return whether a living process holds the lock of a file; any number may ask at once."""
    with suppress(OSError), os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK)) as asked:  # a fifo is not waited for
        try:
            fcntl.flock(asked, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def flush_to_disk(path: Path) -> None:
    """Make a file or folder outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
