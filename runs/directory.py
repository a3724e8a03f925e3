"""A run's directory: making it; and to go on, finding it, checking that it is the same run, tidying its logs."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from errors import CheckpointError, SettingsError
from runs.checkpoint import OUTPUTS, checkpoints_by_step, first_intact, read_meta, read_progress, verify_checkpoint
from runs.quoting import override

T = TypeVar("T")

log = logging.getLogger("tinygpt")

LOGS = ("metrics.jsonl", "train.log")

# What a person asks of one invocation, and what is not remembered from the one before.
OF_THIS_INVOCATION = ("resume", "sweep", "allow_changes", "init_from", "dry_run", "plan", "run_dir")


def make_run_directory(where: str | None) -> Path:
    """The run's directory, made; a new one under outputs/ when none is named.

    Raises SettingsError when it cannot be written, or holds a run.
    """
    if where is None:
        now = datetime.now()
        directory = Path(f"outputs/{now:%Y-%m-%d}/{now:%H-%M-%S}-{secrets.token_hex(2)}")
        if directory.exists():  # another run's, of this second
            return make_run_directory(None)
    else:
        directory = Path(where)
    refuse_used(directory)
    try:
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"run_dir={directory} cannot be written ({error.strerror}): choose a folder that you may write to."
        ) from error
    return directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory


def refuse_used(directory: Path) -> None:
    """Raise SettingsError when a run has left checkpoints in a directory."""
    if checkpoints_by_step(directory / "checkpoints"):
        raise SettingsError(
            f"run_dir={directory} already holds a run: choose another, remove it first, or go on with it by "
            f"{override('resume', directory)}."
        )


def find_run(where: str, folders: Sequence[Path] = OUTPUTS) -> Path | None:
    """The run directory that resume=`where` means; for auto the newest unfinished one, or None.

    Raises SettingsError when the directory holds no run, or the run is still going on.
    """
    if where == "auto":
        found = [path for folder in folders for path in folder.glob("**/checkpoints")]
        newest_first = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
        runs = (path.parent for path in newest_first)
        return next((run for run in runs if is_unfinished(run) and not is_locked(run)), None)
    run = Path(where)
    if not (run / "checkpoints").is_dir():
        raise SettingsError(f"resume={where} holds no run (no folder checkpoints): give a run's directory, or auto.")
    return run


def is_unfinished(run: Path) -> bool:
    """Whether the run's latest checkpoint was written before its end."""
    progress = (read_progress(checkpoint) for checkpoint in checkpoints_by_step(run / "checkpoints"))
    latest = next((p for p in progress if p), {"finished": True})
    return not latest["finished"]


def newest_intact(run: Path) -> tuple[Path, dict[str, Any]]:
    """The latest checkpoint whose every byte is as it was written, and its meta.json.

    Says which damaged ones it passes over; CheckpointError when none is left.
    """
    return _newest(run, lambda path: (path, verify_checkpoint(path)), log.warning)


def saved_settings(run: Path) -> dict[str, Any]:
    """The settings that a run was started with, as in its latest readable checkpoint."""
    settings = _newest(run, read_meta, lambda _: None)["config"]
    return {name: value for name, value in settings.items() if name not in OF_THIS_INVOCATION}


def _newest(run: Path, read: Callable[[Path], T], say: Callable[[str], None]) -> T:
    try:
        return first_intact(checkpoints_by_step(run / "checkpoints"), read, say)
    except (CheckpointError, IndexError) as error:  # all are damaged, or there is none
        raise CheckpointError(f"resume={run} has no checkpoint that can be read: start the run anew.") from error


def tidy(run: Path, saved: dict[str, Any]) -> None:
    """Take from the run's directory what happened after the checkpoint that it goes on from.

    Later checkpoints, which are damaged, are set aside.
    """
    for checkpoint in checkpoints_by_step(run / "checkpoints"):
        if int(checkpoint.name.removeprefix("step_")) > saved["step"]:
            checkpoint.replace(checkpoint.with_name(f"damaged_{checkpoint.name}_{secrets.token_hex(2)}"))
    for name, size in saved["logs"].items():
        path = run / name
        if name in LOGS and path.is_file() and path.stat().st_size > size:
            os.truncate(path, size)


def log_sizes(run: Path) -> dict[str, int]:
    """How long the run's logs are now, in bytes."""
    return {name: (run / name).stat().st_size for name in LOGS if (run / name).is_file()}


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
