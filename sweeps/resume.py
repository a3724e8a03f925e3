"""Going on with a sweep: its command line, and which of its jobs are done."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig

from errors import SettingsError
from runs.directory import is_locked
from runs.quoting import quote, value_typed
from runs.summary import DONE, read_summary

log = logging.getLogger("tinygpt")

RESUME = "sweep.resume="


def resumed_command(arguments: list[str]) -> list[str]:
    """The command line that goes on with the sweep of sweep.resume=DIR, which is among the arguments.

    Raises SettingsError when DIR holds no sweep, one that is still going on, or another one than the
    arguments describe.
    """
    where = value_typed(arguments, RESUME.rstrip("="))
    if not {"--multirun", "-m", "hydra.mode=MULTIRUN"} & set(arguments):
        raise SettingsError(f"{RESUME}{where} goes on with a sweep: add -m, or use resume= for a single run.")
    task, hydra = recorded_overrides(where)
    if is_locked(Path(where)):
        raise SettingsError(f"{RESUME}{where} is a sweep that is still going on: stop that one first.")
    flags = [a for a in arguments if a.startswith("-")]
    given = [a for a in arguments if not a.startswith(("-", RESUME, "hydra.", "hydra/"))]
    if given and sorted(given) != sorted(task):
        new, gone = [o for o in given if o not in task], [o for o in task if o not in given]
        differs = f"without {' '.join(new)}" if new else f"with {' '.join(gone)} too"
        raise SettingsError(f"{RESUME}{where} was started {differs}: leave its overrides out, or start a new sweep.")
    given_to_hydra = [a for a in arguments if a.startswith(("hydra.", "hydra/"))]
    named = {a.partition("=")[0] for a in given_to_hydra} | {"hydra.mode", "hydra.sweep.dir"}
    kept = [a for a in hydra if a.partition("=")[0] not in named]
    quoted = quote(where.rstrip("/"))
    return [*flags, *task, *kept, *given_to_hydra, f"hydra.sweep.dir={quoted}", f"{RESUME}{quoted}"]


def recorded_overrides(where: str) -> tuple[list[str], list[str]]:
    """The overrides, of the settings and of Hydra, that the sweep in a folder was started with."""
    file = Path(where) / "multirun.yaml"
    try:
        if not file.is_file():
            raise SettingsError(
                f"{RESUME}{where} holds no sweep (no multirun.yaml): give the folder that -m made under multirun/."
            )
        overrides = yaml.safe_load(file.read_bytes())["hydra"]["overrides"]
        task, hydra = ([str(override) for override in overrides[kind]] for kind in ("task", "hydra"))
    except (OSError, yaml.YAMLError, LookupError, TypeError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(f"{RESUME}{where}: {file} cannot be read ({reason}): start the sweep anew.") from error
    return [override for override in task if not override.startswith(RESUME)], hydra


def loss_if_done() -> float | None:
    """The validation loss of a resumed sweep's job that is done already and not run again; else None.

    Raises SettingsError when the job's folder holds a run of other settings.
    """
    hydra = HydraConfig.get()
    run = Path(hydra.runtime.output_dir)
    summary = read_summary(run)
    if summary and (has_checkpoints(run) or is_done(summary)):
        before, now = (
            [override for override in overrides if not override.startswith(RESUME)]
            for overrides in (summary["overrides"], hydra.overrides.task)
        )
        if before and sorted(before) != sorted(now):
            raise SettingsError(
                f"{run} holds a run of `{' '.join(before)}`, not of `{' '.join(now)}`: remove it first."
            )
        if is_done(summary):
            bpb = summary["val_bpb"]
            log.info("job %s is %s%s", hydra.job.num, summary["status"], f": {bpb:.4f} bits/byte" if bpb else "")
            return float("inf") if summary["val_loss"] is None else summary["val_loss"]
    return None


def has_checkpoints(run: Path) -> bool:
    return any((run / "checkpoints").glob("step_*"))


def is_done(summary: dict[str, Any] | None) -> bool:
    return summary is not None and summary["status"] in DONE and summary["step"] is not None
