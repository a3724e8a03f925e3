"""Makes Python on Linux lack what Windows lacks, for modules that are imported afterwards.

It can tell that nothing is imported, named or done which Windows lacks; not how Windows does what it has.
"""

import asyncio  # noqa: F401  (before it lacks anything, as all that Python itself brings)
import builtins
import errno
import fcntl
import importlib.abc
import io
import os
import shutil
import signal
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
from collections.abc import Callable
from multiprocessing import pool  # noqa: F401
from pathlib import Path
from types import SimpleNamespace

import filelock  # noqa: F401  (libraries have their own way on Windows)
import torch  # noqa: F401

MODULES = {"fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "readline", "syslog", "posix"}
KEPT = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
OS = ["fork", "forkpty", "sysconf", "getuid", "geteuid", "getgid", "uname", "nice", "mkfifo", "killpg", "setsid"]
OS += ["sched_getaffinity", "fchmod", "fchown", "chown", "statvfs", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY"]


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def opened() -> list[str]:
    """The paths that this process has open or mapped."""
    found = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    with original_open("/proc/self/maps") as maps:
        return found + [line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line]


def refuse_if_open(path) -> None:
    place = os.path.realpath(path)
    if used := [one for one in opened() if one == place or one.startswith(f"{place}/")]:
        raise PermissionError(errno.EACCES, f"used by another process: {used}", str(path))


def refuse_folder(path) -> None:
    if os.path.isdir(path):  # noqa: PTH112
        raise PermissionError(errno.EACCES, "Permission denied", str(path))


def refuse_link(*arguments, **options) -> None:
    raise OSError(errno.EINVAL, "A required privilege is not held by the client")


def refuse_unwritable(descriptor) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")


def refuse_proc(path) -> None:
    if str(path).startswith("/proc"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))


def checked(original: Callable, *checks: Callable) -> Callable:
    """A function whose arguments are checked, each by its check."""

    def operate(*arguments, **options):
        for check, argument in zip(checks, arguments, strict=False):
            check(argument)
        return original(*arguments, **options)

    return operate


original_open = io.open
for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
for name in dir(signal):
    if name.startswith("SIG") and name not in KEPT:
        delattr(signal, name)
signal.SIGBREAK = 12
for name in OS:
    delattr(os, name)
os.process_cpu_count = os.cpu_count  # Linux's, of Python 3.13, would call sched_getaffinity()
shutil._use_fd_functions = False
shutil.disk_usage = lambda path: SimpleNamespace(total=10**12, used=0, free=10**12)  # Linux's calls statvfs()
os.open = checked(os.open, refuse_folder)
os.fsync = checked(os.fsync, refuse_unwritable)
os.symlink = refuse_link
os.replace = checked(os.replace, refuse_if_open, lambda path: (refuse_if_open(path), refuse_folder(path)))
os.rename = os.replace
os.unlink = os.remove = checked(os.unlink, refuse_if_open)
io.open = builtins.open = checked(io.open, refuse_proc)
times = SimpleNamespace(user=0.0, system=0.0)
process = SimpleNamespace(
    memory_info=lambda: SimpleNamespace(peak_wset=700_000_000),
    cpu_times=lambda: times,
)
total = SimpleNamespace(available=8_000_000_000, total=16_000_000_000)
sys.modules["psutil"] = SimpleNamespace(
    virtual_memory=lambda: total,
    Process=lambda: process,
    cpu_times=lambda percpu: [],
)
