"""Locks on folders: who is at work in this one?"""

from __future__ import annotations

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
        raise _in_use(run) from None
    return lock


def refuse_locked(run: Path) -> None:
    """Raise SettingsError when a process that is alive trains in this directory."""
    if is_locked(run):
        raise _in_use(run)


def _in_use(run: Path) -> SettingsError:
    return SettingsError(f"run_dir={run} is in use by a run that is still going on: stop that one first.")


def is_locked(directory: Path) -> bool:
    """Whether a process that is alive works in a run's or a sweep's directory."""
    lock = FileLock(directory / ".lock")
    try:
        if not (directory / ".lock").exists():
            return False
        lock.acquire(timeout=WAIT, poll_interval=0.01)
    except Timeout:
        return True
    except OSError:  # somebody else's folder, to be read only
        return False
    lock.release()
    return False
