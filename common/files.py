"""Atomic writes of files and folders, locks, links, and errors that name a setting."""

import errno
import logging
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from filelock import lock_descriptor  # flock, or LockFileEx on Windows

from common.errors import SettingsError, os_error_reason

log = logging.getLogger("tinygpt")

UNFINISHED = ".unfinished"  # the suffix of files and folders that are being written
# The errors for what a disk cannot do: NFS without a lock daemon, FUSE, CIFS, a folder that a virtual machine shares.
UNABLE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EBADF}
LARGEST = 1 << 28
"""The largest foreign file that is read whole, in bytes; a tokenizer.json takes up to 35 MB."""


def user_path(setting: str, path: str) -> Path:
    """Return the path that a setting gives, with ~ expanded; it need not exist.

    Raises SettingsError if ~NAME is no user, for a drive of Windows elsewhere, for signs of a shell or control
    characters in a path that does not exist, or if the system refuses the path: a name is too long, links form a loop,
    a folder on the way is closed.
    """
    # Up to the last name that has such a character, as YAML makes of a Windows path between double quotes.
    controlled = re.match(r".*[\0-\x1f\x7f-\x9f\u2028\u2029][^/]*", str(path), re.DOTALL)
    if controlled and not os.path.lexists(controlled[0]):
        fault = "has characters that a backslash and a letter stand for"
        remedy = "write it with /, or put it in single quotes, between which YAML leaves a backslash as it is"
        raise SettingsError(fault, remedy, setting=setting, value=path)
    drive, colon, below = str(path).partition(":")
    if os.name == "posix" and re.fullmatch("[A-Za-z]", drive) and colon and not os.path.lexists(path):
        # Without its backslashes, which a shell takes, the rest is not known.
        rest = below.replace("\\", "/").lstrip("/") if re.match(r"[\\/]", below) else "…"
        remedy = f"in WSL write {setting}=/mnt/{drive.lower()}/{rest}"
        raise SettingsError("is on a drive of Windows", remedy, setting=setting, value=path)
    plain = without_shell_signs(str(path))
    if plain != str(path) and not os.path.lexists(path):
        remedy = f"leave them out: {shlex.quote(f'{setting}={plain}')}"
        raise SettingsError("has quotes or backslashes that are the shell's", remedy, setting=setting, value=path)
    try:
        place = Path(path).expanduser()
    except RuntimeError:
        if str(path).split("/")[0] == "~":
            fault = "is in a home folder, and neither HOME nor the system names one"
            raise SettingsError(fault, f"set HOME, or {setting}=FOLDER", setting=setting, value=path) from None
        fault = "names no user of this machine"
        raise SettingsError(fault, "write the folder out", setting=setting, value=path) from None
    with os_errors_named(setting, path, "used", "name another place"), suppress(FileNotFoundError, NotADirectoryError):
        place.stat()
    return place


def is_there(name: str, value: str) -> bool:
    """Return whether the value of a setting is the path of something, as it is typed."""
    with suppress(OSError, SettingsError):  # a list may be too long for a name
        return not {*value} & {*"\"'([{"} and user_path(name, value).exists()
    return False


def without_dots(path: Path) -> Path:
    """Return a path without `..`, so that a file has one name in every current folder.

    What stands before the last one is resolved, with its links; what stands behind it is kept.
    """
    parts = path.parts
    if ".." not in parts:
        return path
    end = len(parts) - parts[::-1].index("..")
    return Path(*parts[:end]).resolve() / Path(*parts[end:])


def without_shell_signs(path: str) -> str:
    """Return a path without quotes around it, and without backslashes before blanks and signs.

    A shell takes them; between other quotes, and in a file of settings, they are left.
    """
    quoted = re.fullmatch(r"""(["'])((?:(?!\1).)+)\1""", path)
    inner = quoted[2] if quoted else path
    return re.sub(r"\\(?=[ ()&'\"])", "", inner) if os.name == "posix" else inner


def largest_file() -> float:
    """Return the bytes of the largest file that this process may write, as ulimit -f limits it."""
    with suppress(ImportError):  # on Windows
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return math.inf if limit == resource.RLIM_INFINITY else limit
    return math.inf


@contextmanager
def os_errors_named(setting: str, path: object, verb: str, remedy: str) -> Iterator[None]:
    """Turn an OSError within into a SettingsError: SETTING=PATH cannot be VERB (reason): REMEDY."""
    try:
        yield
    except BrokenPipeError:  # of the output that is printed meanwhile
        raise
    except OSError as error:
        reason = os_error_reason(error)
        if isinstance(error, PermissionError):
            reason += owner_named(error.filename)
        raise SettingsError(f"cannot be {verb} ({reason})", remedy, setting=setting, value=path) from None


def owner_named(place: object) -> str:
    """Return ": PLACE belongs to NAME" for a place of another user, otherwise "".

    The folder above stands for a place that does not exist.
    """
    if not isinstance(place, str | os.PathLike) or os.name == "nt":
        return ""
    path = Path(place)
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    with suppress(OSError):
        user = path.stat().st_uid
        if user != os.geteuid():
            try:
                return f": {path} belongs to {path.owner()}"
            except KeyError:
                return f": {path} belongs to user {user}"
    return ""


def reading(setting: str, path: str) -> AbstractContextManager[None]:
    """Turn an OSError while SETTING=PATH is read into a SettingsError."""
    return os_errors_named(setting, path, "read", "give one that exists and that you may read")


def regular(path: Path) -> Path:
    """Return `path`, a regular file; OSError for a FIFO or a device, whose reading may not end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")
    return path


def read_foreign(path: Path) -> bytes:
    """Return the content of a foreign file; OSError if it is not regular or over LARGEST bytes."""
    with regular(path).open("rb") as file:
        # Not by its size, which is 0 for a file in /proc.
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(f"larger than {LARGEST >> 20} MB")
    return content


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary name for a file or folder that replaces `path` atomically.

    The body writes it. Then it is flushed to disk and renamed in one step, so a reader, a kill or a power cut finds
    the old one or the new one. If the body raises, or the disk, the old one stays and the new one is removed: nothing
    is raised after the rename. shared: whether it gets the permissions of its folder, whatever the umask.
    """
    # Of a name of 255 bytes, as long as disks take, a part leaves room for the rest: 50 letters have at most 200 bytes.
    unfinished = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield unfinished
        for written in [*unfinished.rglob("*"), unfinished]:
            flush_to_disk(written)
        if shared:
            share(unfinished)
        flush_to_disk(path.parent)  # a disk that fails says so here, while the old one is there
        for wait in (0.01, 0.1, 1, 0):  # Windows cannot rename a file while a virus scanner has it open
            try:
                unfinished.replace(path)
                break
            except PermissionError:
                if not wait:
                    raise
                time.sleep(wait)
    except BaseException:
        remove(unfinished)
        raise
    with suppress(OSError):
        flush_to_disk(path.parent)


@contextmanager
def writing(setting: str, path: str) -> Iterator[Path]:
    """Yield a temporary name for a file or folder that replaces SETTING=PATH atomically.

    A link is followed. An OSError, here or in the body, becomes a SettingsError.
    """
    place = user_path(setting, path)
    target = Path(os.path.realpath(place))
    has_folder = os.path.isdir(target.parent)  # noqa: PTH112  # which raises nothing
    remedy = "name another place" if has_folder else "name another place, or make its folder first"
    with os_errors_named(setting, path, "written", remedy):
        if place.exists():
            regular(place)
        with replacing(target) as unfinished:
            # Refuse a folder that cannot be written before the body works for minutes.
            unfinished.touch()
            unfinished.unlink()
            yield unfinished


def replace_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8, atomically; lone surrogates become question marks."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="replace")


def keep_copies(file: Path) -> None:
    """Give a file that has other names, as in copies by cp -al, bytes of its own to write to."""
    if file.is_file() and file.stat().st_nlink > 1:
        with replacing(file) as unfinished:
            shutil.copy2(file, unfinished)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder if it exists and can be deleted; never raises."""
    shutil.rmtree(path, ignore_errors=True)  # deletes a folder, but no link to one
    with suppress(OSError):
        path.unlink()


class NoLocks(OSError):
    """A disk without locks."""


def lock(file: Path, wait: float = 0.2) -> IO[str]:
    """Return an open file whose lock this process holds until it is closed, or the process ends.

    wait: seconds to try, because is_locked() of another process holds the lock for an instant. Raises BlockingIOError
    if another process still holds the lock, and NoLocks if the disk has none.
    """
    # Not filelock's FileLock: it opens a file for writing, which another user's need not allow, and falls back to a
    # file that a killed process leaves behind.
    try:
        held = file.open("a")
    except PermissionError:
        if not file.is_file():
            raise
        held = file.open()  # suffices for a lock, but for NFS
    until = time.monotonic() + wait
    try:
        while not lock_descriptor(held.fileno(), blocking=False):
            if time.monotonic() > until:
                raise BlockingIOError(f"{file} is locked")
            time.sleep(0.01)
    except BaseException as error:
        held.close()
        if isinstance(error, OSError) and error.errno in UNABLE:
            raise NoLocks(error.errno, error.strerror, str(file)) from error
        raise
    return held


@contextmanager
def locked(file: Path, wait: float = 0.2) -> Iterator[bool]:
    """Hold a file's lock inside, and yield whether the disk has locks.

    One that has none is told once. The file names this process, for holder_of(). Raises BlockingIOError if another
    process holds the lock.
    """
    try:
        held = lock(file, wait)
    except NoLocks as error:
        tell_of_no_locks(f"{error.strerror}")
        yield False
        return
    with held:
        name_holder(held, f"process {os.getpid()} on {platform.node()}")
        try:
            yield True
        finally:
            name_holder(held, "")


def name_holder(held: IO[str], name: str) -> None:
    """Write a name into an open file in place of its content, if that can be written."""
    with suppress(OSError):  # of another user's file, or of a full disk
        os.ftruncate(held.fileno(), 0)
        os.write(held.fileno(), name.encode())


def holder_of(file: Path) -> str:
    """Return " (process 1234 on a machine)" for a locked file, "" if nobody knows."""
    with suppress(OSError):
        holder = file.read_text(encoding="utf-8", errors="replace")
        return f" ({holder})" if holder else ""
    return ""


@cache
def tell_of_no_locks(reason: str) -> None:
    log.warning(
        "This disk has no locks (%s), so nothing stops a second process from using the same folder: start none there.",
        reason,
    )


def is_locked(file: Path) -> bool | None:
    """Return whether a living process holds the lock of a file, perhaps another user's.

    None if the disk cannot tell.
    """
    try:
        if file.is_file():  # opening a FIFO would wait
            lock(file, 0.05).close()
    except BlockingIOError:
        return True
    except NoLocks:
        return None
    except OSError:
        pass
    return False


def make_shared_folder(folder: Path) -> None:
    """Make a folder with the permissions of the folder above, whose users share its files."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        share(folder)


def share(path: Path) -> None:
    """Give a new file or folder, and all in it, the permissions of the folder that it is in."""
    with suppress(OSError):  # of a disk without permissions
        mode = stat.S_IMODE(path.parent.stat().st_mode)
        for place in [path, *path.rglob("*")]:
            place.chmod(mode if place.is_dir() else mode & 0o666)


def point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to its neighbour `target`, or a text file with its name.

    The file is for disks without links, and for Windows: it demands a privilege for links, and cannot replace a link to
    a folder in one step.
    """
    # A folder, if the run was copied by a tool that follows links.
    if link.is_dir() and not link.is_symlink():
        remove(link)
    with replacing(link) as unfinished:
        with suppress(OSError):
            if os.name != "nt":
                return unfinished.symlink_to(target)
        unfinished.write_text(target, encoding="utf-8")


def pointed(link: Path) -> Path:
    """Return the folder to which point() made `link` lead; `link` itself if there is none."""
    # It may be no regular file, or its text no UTF-8 or no name.
    with suppress(OSError, ValueError):
        target = link.with_name(read_foreign(link).decode().strip())
        link = target if target.is_dir() else link
    return link.resolve()


def flush_to_disk(path: Path) -> None:
    """Write a file or folder through to the disk, so that it survives a power cut.

    A disk that cannot do so is left to its own ways, as databases do. Raises OSError if the disk fails.
    """
    is_folder = path.is_dir()
    # Windows flushes only files that are open for writing. It cannot open folders, and need not flush them.
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    except PermissionError:
        if is_folder:
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (*UNABLE, errno.EACCES, errno.EPERM):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
