"""Sweeps whose jobs run side by side or elsewhere: how they share a machine, and what goes wrong with launchers."""

from __future__ import annotations

import logging
import multiprocessing
import re

# The launchers of conf/hydra/launcher, by their classes, and the extra that each is installed with.
EXTRAS = {
    "JoblibLauncher": ("joblib", "parallel"),
    "LocalLauncher": ("submitit_local", "slurm"),
    "SlurmLauncher": ("submitit_slurm", "slurm"),
}
RANGES = "choice(2,4,8), range(1,5), interval(0.005,0.05) and tag(log,interval(0.005,0.05))"


def jobs_at_once() -> int:
    """How many jobs this machine trains at a time: one for each accelerator, or else for each core."""
    import joblib
    import torch

    return torch.cuda.device_count() or int(torch.backends.mps.is_available()) or joblib.cpu_count()


def device_of_job(device: str, number: int) -> str:
    """The device of job `number` of those that share the machine: auto and cuda are dealt out in turn."""
    import torch

    count = torch.cuda.device_count()
    return f"cuda:{number % count}" if device in ("auto", "cuda") and count > 1 else device


def label_lines(number: int) -> None:
    """In a worker process, begin each line on the terminal with the job's number; files stay as they are."""
    if multiprocessing.parent_process() is None:
        return
    for handler in logging.getLogger().handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.setFormatter(_Labelled(number))


class _Labelled(logging.Formatter):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(f"{self.number:>3} │ {line}" for line in super().format(record).strip("\n").splitlines())


def explain_launch(error: BaseException) -> str | None:
    """One sentence for what a launcher or sweeper refuses; None for any other error."""
    message, kind = str(error), type(error).__name__
    if (unknown := re.search(r"Unknown plugin class : '.*\.(\w+)'", message)) and unknown[1] in EXTRAS:
        name, extra = EXTRAS[unknown[1]]
        return f'hydra/launcher={name} is not installed: pip install -e ".[{extra}]".'
    if "does not support sweep type" in message:
        return (
            "interval() has no end of values to try: add hydra/sweeper=optuna to search it, or list some, as in 1,2,3."
        )
    if "requires --multirun" in message or "hydra.job.num" in message:
        return "many runs are asked for, and one would be made: add -m."
    if "n_jobs" in message and not message.startswith(("Could not override", "Key 'n_jobs' not in")):
        return f"hydra.launcher.n_jobs must be a whole number from 1, or -1 for all cores ({message.rstrip('.')})."
    if kind in ("TerminatedWorkerError", "BrokenProcessPool"):
        return (
            "a worker process was ended from outside, most likely because the jobs together need more memory "
            "than there is: lower hydra.launcher.n_jobs."
        )
    if "are you indeed on a slurm cluster" in message:
        return "hydra/launcher=submitit_slurm finds no Slurm here: start it on a login node, or use submitit_local."
    if kind in ("UncompletedJobError", "FailedJobError"):
        return (
            f"a job ended without a result, its log is in .submitit/ of the sweep's folder; the same command with "
            f"hydra.sweep.dir=FOLDER goes on with what is unfinished ({' '.join(message.split())[:200]})."
        )
    return None
