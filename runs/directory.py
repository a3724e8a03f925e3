"""A run's directory: made, found, locked, and made ready to go on in."""

import logging
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml
from filelock import FileLock, Timeout

from errors import CheckpointError, FormatError, SettingsError
from runs.checkpoint import Meta, checkpoints_by_step, first_intact, put_back, read_meta, runs_by_age, verify_checkpoint
from runs.formatting import LogFormatter, flat, hydra_quoted

T = TypeVar("T")
log = logging.getLogger("tinygpt")

LOGS = ("metrics.jsonl", "report.jsonl", "train.log")

# What a person asks of one invocation, which the next one does not inherit.
OF_THIS_INVOCATION = ("resume", "sweep", "allow_changes", "init_from", "dry_run", "plan", "run_dir")

# What may change while the run goes on: when it ends, what it shows and keeps, where it computes.
FREE = (
    *OF_THIS_INVOCATION,
    *("max_steps", "max_minutes", "max_flops", "max_skipped_steps"),
    *("log_interval", "eval_interval", "eval_batch_size", "checkpoint_interval", "keep_checkpoints"),
    *("sample_tokens", "sample_prompt", "wandb", "data.cache_dir"),
    *("device", "compile", "deterministic", "distributed", "recompute", "micro_batch_size"),
)


def make_run_directory(where: str | None) -> Path:
    """Make and return the run's directory; a new one under outputs/ for None."""
    if where is None:
        where = f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(2)}"
        if Path(where).exists():  # another run began in this second
            return make_run_directory(None)
    directory = Path(where)
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    return directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory


def refuse_used(directory: Path, *, locked: bool = False) -> None:
    """Raise SettingsError when a directory is a file, or a run is at work (unless it is this one) or has been there."""
    if file := next((place for place in (directory, *directory.parents) if place.is_file()), None):
        raise SettingsError(f"run_dir={directory} cannot be made, for {file} is a file: choose another folder.")
    if not locked:
        refuse_locked(directory)
    if checkpoints_by_step(directory / "checkpoints"):
        remedy = f"choose another, remove it first, or go on with it by {hydra_quoted('resume', directory)}"
        raise SettingsError(f"run_dir={directory} already holds a run: {remedy}.")


def find_run(where: str, run_dir: str | None) -> Path | None:
    """Return the run directory that resume=`where` means; for auto the newest unfinished one of run_dir, or None."""
    if where == "auto":
        for run in runs_by_age([Path(run_dir)]) if run_dir else runs_by_age():
            with suppress(CheckpointError):  # it has none that can be read
                if not is_locked(run) and not _newest(run, read_meta)["progress"]["finished"]:
                    return run
        return None
    run = Path(where)
    if not (run / "checkpoints").is_dir():
        raise SettingsError(f"resume={where} holds no run (no folder checkpoints): give a run's directory, or auto.")
    refuse_locked(run)
    return run


def newest_intact(run: Path) -> tuple[Path, Meta]:
    """Return the latest checkpoint intact to the byte, and its meta.json; log damaged ones; CheckpointError if none."""
    # The run is locked: what another process is writing there would be neither whole nor damaged.
    put_back(run / "checkpoints")
    return _newest(run, lambda path: (path, verify_checkpoint(path)), log.warning)


def saved_settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run, from its latest readable checkpoint."""
    settings = _newest(run, read_meta)["config"]
    return {name: value for name, value in settings.items() if name not in OF_THIS_INVOCATION}


def _newest(run: Path, read: Callable[[Path], T], say: Callable[[str], None] = log.debug) -> T:
    try:
        return first_intact(checkpoints_by_step(run / "checkpoints"), read, say)
    except FormatError:
        raise
    except CheckpointError as error:
        reason = str(error).rpartition(": ")[0] or "there is none"
        raise CheckpointError(f"resume={run} has no checkpoint that can be read ({reason}): start anew.") from error


def written_settings(run: Path) -> dict[str, Any]:
    """Return the settings in a run's config.yaml by their dotted names; none where it cannot be read."""
    try:
        return flat(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return {}


def check_settings(settings: dict[str, Any], saved: Meta, *, data: str) -> None:
    """Raise SettingsError, naming every setting that differs from the saved run's and would change its result.

    data: a name for the tokens that changes with the text, compared with the one that was saved.
    """
    now, before = flat(settings), flat(saved["config"])
    differing = [name for name in sorted(before) if now.get(name) != before[name]]  # younger settings were not there
    bound = [name for name in differing if not f"{name}.".startswith(tuple(f"{free}." for free in FREE))]
    changed = [f"{name}={now.get(name)} (was {before.get(name)})" for name in bound]
    remedies = ["leave these out"] * bool(changed) + ["restore the text"] * (data != saved["data"])
    changed += ["the text has changed"] * (data != saved["data"])
    sentence = f"resume={settings['resume']} would not be the same run: {', '.join(changed)}"
    if "optimizer.name" in bound:  # the state of one means nothing to another
        again = f"leave it out, or begin anew with {hydra_quoted('init_from', settings['resume'])}"
        raise SettingsError(f"{sentence}, and what the optimizer has kept fits no other: {again}.")
    if changed and not settings["allow_changes"]:
        remedy = " and ".join(remedies)
        raise SettingsError(f"{sentence}: {remedy}, or set allow_changes=true to go on from there all the same.")
    if changed:
        log.warning("%s.", sentence)


def tidy(run: Path, saved: Meta) -> None:
    """Take out of a run's directory what came after the checkpoint it goes on from; rename later, damaged ones."""
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


def log_to(directory: Path, stack: ExitStack) -> None:
    """Write what is logged to a run's train.log, until the stack is closed."""
    handler = logging.FileHandler(directory / "train.log", encoding="utf-8", errors="backslashreplace")
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk ends no run
    handler.setFormatter(LogFormatter("[%(asctime)s] %(message)s"))
    stack.callback(handler.close)
    log.addHandler(handler)
    stack.callback(log.removeHandler, handler)
    if not log.isEnabledFor(logging.INFO):  # nobody has set up logging
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.INFO)


def lock_run(run: Path) -> FileLock:
    """Keep other processes from training in this directory for as long as this one lives."""
    lock = FileLock(run / ".lock")
    try:  # processes that ask is_locked hold it for an instant
        lock.acquire(timeout=0.2, poll_interval=0.01)
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
    with suppress(SettingsError):
        refuse_locked(directory)
        return False
    return True
