"""Locks on folders: who is at work in this one?"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from training.config import SettingsError

WAIT = 0.2
"""Seconds to wait for a lock, which other processes that ask is_locked hold for an instant."""


def lock_run(run: Path) -> FileLock:
    """Keep other processes from training in this directory for as long as this one lives."""
    lock = FileLock(run / ".lock")
    try:
        lock.acquire(timeout=WAIT, poll_interval=0.01)
    except Timeout:
        raise SettingsError(f"run_dir={run} is in use by a run that is still going on: stop that one first.") from None
    return lock


def refuse_locked(run: Path) -> None:
    """Raise SettingsError when a process that is alive trains in this directory."""
    with suppress(OSError):  # somebody else's folder, to be read only
        if (run / ".lock").exists():
            lock_run(run).release()


def is_locked(directory: Path) -> bool:
    """Whether a process that is alive works in a run's or a sweep's directory."""
    try:
        refuse_locked(directory)
    except SettingsError:
        return True
    return False
