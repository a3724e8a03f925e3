"""What happens around the jobs of a sweep (-m), and the leaderboard that it ends in."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from errors import SettingsError
from runs.directory import lock_run
from runs.quoting import override
from runs.summary import read_summary, sentence_of, write_summary
from sweeps.jobs import read_jobs
from sweeps.leaderboard import write_leaderboard
from sweeps.resume import has_checkpoints, is_done
from sweeps.trial import JOURNAL


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
            sweep = Path(config.hydra.sweep.dir)
            write_leaderboard(sweep, read_jobs(sweep))


def record_end(error: BaseException) -> None:
    """Write into the summary.json of the job at work why it failed or, before it trained, that it was stopped.

    What lies there stays if it is another run's.
    """
    hydra = HydraConfig.get()
    run = Path(hydra.runtime.output_dir)
    summary = read_summary(run)
    if hydra.output_subdir is None or summary is None or is_done(summary):
        return
    is_stop = isinstance(error, (KeyboardInterrupt, SystemExit))
    if summary["step"] is None or (hydra.mode == RunMode.MULTIRUN and not is_stop):  # None: it has not begun to train
        how, why = ("stopped", "by a signal before the first step") if is_stop else ("failed", sentence_of(error))
        write_summary(run, summary | {"status": how, "reason": why})


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
    jobs = read_jobs(sweep)
    if text := write_leaderboard(sweep, jobs):
        print(f"\n{text}", flush=True)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        print(f"sweep     stopped; to go on:  python train.py -m {override('sweep.resume', sweep)}", flush=True)
        return
    if (sweep / JOURNAL).is_file():  # a search goes round what fails
        return
    failed = [job for job in jobs if job.status == "failed"]
    if failed and (error is None or sentence_of(error) in {job.summary["reason"] for job in failed}):
        raise SettingsError(
            f"{len(failed)} of {len(jobs)} jobs failed: the reasons are at the end of {sweep / 'leaderboard.md'}."
        ) from error
