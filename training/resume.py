"""A run's directory: making it; and to go on, finding it, checking that it is the same run, tidying its logs."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from training.checkpoint import (
    OUTPUTS,
    CheckpointError,
    checkpoints_by_step,
    first_intact,
    read_meta,
    read_progress,
    verify_checkpoint,
)
from training.config import SettingsError, TrainConfig
from training.lock import is_locked
from training.override import override

T = TypeVar("T")

log = logging.getLogger("tinygpt")

LOGS = ("metrics.jsonl", "train.log")

# What a person asks of one invocation, and what is not remembered from the one before.
OF_THIS_INVOCATION = ("resume", "sweep", "allow_changes", "init_from", "dry_run", "plan", "run_dir")
# What may change while the run goes on: when it ends, what it shows and keeps, where it computes.
FREE = (
    *OF_THIS_INVOCATION,
    *("max_steps", "max_minutes", "max_flops", "max_skipped_steps"),
    *("log_interval", "eval_interval", "eval_batch_size", "checkpoint_interval", "keep_checkpoints"),
    *("sample_tokens", "sample_prompt", "wandb", "data.cache_dir"),
    *("device", "compile", "deterministic", "distributed", "micro_batch_size"),
)


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


def check_settings(config: TrainConfig, saved: dict[str, Any], *, data: str) -> None:
    """Raise SettingsError, naming every setting that differs from the saved run's and would change its result.

    data: a name for the tokens that changes with the text, compared with the one that was saved.
    """
    now, before = _flat(asdict(config)), _flat(saved["config"])
    changed = [
        f"{name}={now.get(name)} (was {before.get(name)})"
        for name in sorted(now.keys() | before.keys())
        if now.get(name) != before.get(name) and not _is_free(name)
    ]
    if data != saved["data"]:
        changed.append("the text has changed")
    if not changed:
        return
    sentence = f"resume={config.resume} would not be the same run: {', '.join(changed)}"
    if not config.allow_changes:
        raise SettingsError(f"{sentence}: leave these out, or set allow_changes=true to go on from there all the same.")
    log.warning("%s.", sentence)


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


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(free + ".") for free in FREE)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
