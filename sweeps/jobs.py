"""The jobs of a sweep, read from what they left on the disk, and their ranks."""

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs.directory import is_locked
from runs.job import NAME, JobRecord, read_job
from runs.metrics import read_metrics
from runs.summary import NOTHING_KNOWN, is_number, read_summary


@dataclass
class Job:
    """One job of a sweep: its folder, the folder's name below the sweep's, its overrides by name, its summary.json."""

    directory: Path
    name: str
    settings: dict[str, str]
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        return self.summary["status"]


@dataclass
class Row:
    """Jobs that differ in nothing but their seed, or a single one."""

    jobs: list[Job]

    @property
    def place(self) -> tuple[bool, bool, float]:
        """Its sort key: the finished by bits per byte, then those under way or stopped, then the failed."""
        status = self.jobs[0].status
        return status == "failed", status != "finished", self.mean("val_bpb") or float("inf")

    def values(self, name: str) -> list[float]:
        return [job.summary[name] for job in self.jobs if job.summary[name] is not None]

    def mean(self, name: str) -> float | None:
        return statistics.fmean(self.values(name)) if self.values(name) else None

    def deviation(self, name: str) -> float | None:
        """Return the standard deviation of the sample (n - 1); None for a single job."""
        return statistics.stdev(self.values(name)) if len(self.values(name)) > 1 else None


def read_jobs(sweep: Path) -> list[Job]:
    """Return the jobs in a sweep's folder in the order of their numbers; what cannot be read is passed over."""
    folders = [path.parent for path in sweep.glob(f"*/**/{NAME}")]
    found = [(record, folder) for folder in folders if (record := read_job(folder))]
    goes_on = is_locked(sweep)
    return [
        _read_job(folder, folder.relative_to(sweep).as_posix(), record, goes_on)
        for record, folder in sorted(found, key=lambda pair: (pair[0].number, pair[1]))
    ]


def _read_job(folder: Path, name: str, record: JobRecord, goes_on: bool) -> Job:
    summary = read_summary(folder) or NOTHING_KNOWN
    if record.reason:
        summary = summary | {"status": "failed", "reason": record.reason}
    if summary["status"] == "running":
        prepares = goes_on and summary["step"] is None
        if not prepares and (rows := read_metrics(folder / "metrics.jsonl")):  # later than what summary.json is from
            known = ("step", "tokens", "seconds")
            summary = summary | {name: rows[-1][name] for name in known if is_number(rows[-1].get(name))}
        if not prepares and not is_locked(folder):
            reason = f"ended without a word after step {summary['step'] or 0}"
            summary = summary | {"status": "stopped", "reason": reason}
    if summary["device"] == "cpu":  # there jobs share a process, which keeps in pieces what those before it took
        summary = summary | {"peak_memory_mb": None}
    pairs = [override.lstrip("+~").partition("=") for override in record.overrides]
    return Job(folder, name, {key: _short(value) for key, _, value in pairs}, summary)


def _short(value: str) -> str:
    """Return a value of 1e10 as 1e+10: a sweep's overrides have it as 10000000000.0."""
    short = f"{float(value):g}" if re.fullmatch(r"[0-9]{7,}\.0", value) else value
    return short if short == value or float(short) == float(value) else value


def swept_settings(jobs: list[Job]) -> list[str]:
    """Return the settings in which the jobs differ, in the order of the command line."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    return [name for name in names if len({job.settings.get(name) for job in jobs}) > 1]


def rank(jobs: list[Job]) -> list[Row]:
    """Return the jobs, the best first; finished ones that differ in their seed alone share a row."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        alike = tuple(sorted((key, value) for key, value in job.settings.items() if key != "seed"))
        groups.setdefault((alike, job.status == "finished" or job.name), []).append(job)
    return sorted((Row(group) for group in groups.values()), key=lambda row: row.place)
