"""Sweeps (-m): what happens around their jobs, how they go on after a stop, and the leaderboard they end in.

By hand, for any sweep's folder, one that still runs as well:  python -m training.sweep DIR
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from training.config import SettingsError
from training.launch import quote
from training.leaderboard import comma_separated, markdown, read_jobs
from training.lock import is_locked, lock_run
from training.report import html_report
from training.summary import DONE, read_summary, replace_file, sentence_of, write_summary
from training.trial import JOURNAL

log = logging.getLogger("tinygpt")

RESUME = "sweep.resume="


class _Sweep:
    """The sweep that this process runs; the jobs of a parallel launcher are elsewhere and see none."""

    directory: Path | None = None
    lock: FileLock | None = None


class Leaderboard(Callback):
    """What Hydra calls around jobs: it begins their summary.json and rewrites the leaderboard after each."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if not _is_first_rank():
            return
        sweep = Path(config.hydra.sweep.dir)
        try:
            sweep.mkdir(parents=True, exist_ok=True)
            _Sweep.lock = lock_run(sweep)
        except (SettingsError, OSError) as error:
            why = (
                f"cannot be written ({error.strerror})" if isinstance(error, OSError) else "is in use by another sweep"
            )
            print(f"error: hydra.sweep.dir={sweep} {why}: name another folder.", file=sys.stderr)
            sys.exit(1)  # Hydra makes a warning of any exception
        _Sweep.directory = sweep
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        if config.hydra.output_subdir is None:  # a dry run, or one that is resumed by itself
            return
        run = Path(config.hydra.runtime.output_dir)
        in_sweep = config.hydra.mode == RunMode.MULTIRUN
        names = {"job": config.hydra.job.num if in_sweep else None, "overrides": list(config.hydra.overrides.task)}
        summary = read_summary(run)
        if not has_checkpoints(run) and not (config.sweep.resume and is_done(summary)):
            write_summary(run, names)
        elif config.sweep.resume and not (summary and summary["overrides"]):  # lost
            write_summary(run, (summary or {}) | names)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        if job_return.status == JobStatus.FAILED:
            _forget(job_return._return_value)
            if config.hydra.sweeper._target_.endswith(".BasicSweeper"):  # it would end at a failure
                job_return.status, job_return.return_value = JobStatus.COMPLETED, float("inf")
        _free_memory()
        if _is_first_rank():
            write_leaderboard(Path(config.hydra.sweep.dir))


def record_failure(error: BaseException) -> None:
    """Write into the summary.json of the job at work why it failed, unless what lies there is another run's."""
    hydra = HydraConfig.get()
    run = Path(hydra.runtime.output_dir)
    summary = read_summary(run)
    if hydra.output_subdir is None or summary is None or is_done(summary):
        return
    if hydra.mode == RunMode.MULTIRUN or summary["step"] is None:  # None: it has not begun to train
        write_summary(run, summary | {"status": "failed", "reason": sentence_of(error)})


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _forget(error: BaseException | None) -> None:
    """Let go of what an exception's frames hold: the model, the optimizer, the data."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _free_memory() -> None:
    """Give back what a job held, compiled code too, before the next one begins."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # no glibc, whose allocator would keep it
        ctypes.CDLL(None).malloc_trim(0)


def has_checkpoints(run: Path) -> bool:
    return any((run / "checkpoints").glob("step_*"))


def is_done(summary: dict[str, Any] | None) -> bool:
    return summary is not None and summary["status"] in DONE and summary["step"] is not None


def write_leaderboard(sweep: Path) -> str:
    """Write leaderboard.csv, leaderboard.md and report.html from what is in a sweep's folder; returns the table."""
    jobs = read_jobs(sweep)
    if not jobs:
        return ""
    table = markdown(jobs)
    files = {"leaderboard.csv": comma_separated(jobs), "leaderboard.md": table, "report.html": html_report(sweep, jobs)}
    for name, text in files.items():
        try:
            replace_file(sweep / name, text)
        except OSError as error:
            log.error("%s cannot be written (%s).", sweep / name, error)
    return table


def end_sweep(error: BaseException | None) -> None:
    """Write and print the leaderboard of the sweep that has just ended, if one has.

    error: what ended it, None where it came to its end. Raises SettingsError where jobs have failed.
    """
    sweep, lock = _Sweep.directory, _Sweep.lock
    _Sweep.directory = _Sweep.lock = None
    if sweep is None:
        return
    if lock is not None:
        lock.release()
    table = write_leaderboard(sweep)
    if table:
        print(f"\n{table}\ntable     {sweep / 'leaderboard.md'}\ncurves    {sweep / 'report.html'}", flush=True)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        print(f"sweep     stopped; to go on:  python train.py -m {RESUME}{sweep}", flush=True)
        return
    if (sweep / JOURNAL).is_file():  # a search goes round what fails
        return
    jobs = read_jobs(sweep)
    failed = [job for job in jobs if job.status == "failed"]
    if failed and (error is None or sentence_of(error) in {job.summary["reason"] for job in failed}):
        raise SettingsError(
            f"{len(failed)} of {len(jobs)} jobs failed: the reasons are at the end of {sweep / 'leaderboard.md'}."
        ) from error


def resumed_command(arguments: list[str]) -> list[str]:
    """The command line that goes on with the sweep of sweep.resume=DIR, which is among the arguments.

    Raises SettingsError when DIR holds no sweep, one that is still going on, or another one than the
    arguments describe.
    """
    where = next(a for a in reversed(arguments) if a.startswith(RESUME)).removeprefix(RESUME).strip("'\"")
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


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m training.sweep DIR    (a folder that -m made under multirun/)")
    sweep = Path(sys.argv[1])
    table = write_leaderboard(sweep)
    if not table:
        sys.exit(f"error: {sweep} holds no sweep (no folders of jobs): give the folder that -m made under multirun/.")
    print(f"{table}\ntable     {sweep / 'leaderboard.md'}\ncurves    {sweep / 'report.html'}")


if __name__ == "__main__":
    main()
