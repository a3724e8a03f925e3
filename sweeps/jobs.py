"""The jobs of a sweep, read from what they left on the disk, and their ranks."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runs.directory import is_locked
from runs.metrics import read_metrics
from runs.summary import NOTHING_KNOWN, is_number, read_summary

NOT_SETTINGS = ("sweep.resume", "resume", "run_dir")
"""Overrides that say where a job works, not what it is."""


@dataclass
class Job:
    """One job of a sweep: its folder, its overrides by name, and its summary.json."""

    directory: Path
    name: str
    """The folder's name below the sweep's: the job's number."""
    settings: dict[str, str]
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        return self.summary["status"]

    @property
    def bpb(self) -> float | None:
        return self.summary["val_bpb"]

    @property
    def place(self) -> tuple[bool, bool, float]:
        """Where it stands: the finished by bits per byte, then those under way or stopped, then the failed."""
        bpb = float("inf") if self.bpb is None else self.bpb
        return self.status == "failed", self.status != "finished", bpb


@dataclass
class Row:
    """Jobs that differ in nothing but their seed, or a single one."""

    jobs: list[Job]

    @property
    def place(self) -> tuple[bool, bool, float]:
        return *self.jobs[0].place[:2], self.mean("val_bpb") or float("inf")

    def values(self, name: str) -> list[float]:
        return [job.summary[name] for job in self.jobs if job.summary[name] is not None]

    def mean(self, name: str) -> float | None:
        return statistics.fmean(self.values(name)) if self.values(name) else None

    def deviation(self, name: str) -> float | None:
        """Standard deviation of the sample (n - 1); None for a single job."""
        return statistics.stdev(self.values(name)) if len(self.values(name)) > 1 else None


def read_jobs(sweep: Path) -> list[Job]:
    """The jobs that left something in a sweep's folder, in their order; what cannot be read is passed over."""
    try:
        folders = {path.parent.parent for path in sweep.glob("*/**/.hydra/overrides.yaml")}
        folders |= {path.parent for path in sweep.glob("*/**/summary.json")}
    except OSError:
        return []
    goes_on = is_locked(sweep)
    jobs = [_read_job(folder, folder.relative_to(sweep).as_posix(), goes_on) for folder in folders]
    return sorted(
        jobs, key=lambda job: [(not part.isdecimal(), part.zfill(9)) for part in re.split(r"(\d+)", job.name)]
    )


def _read_job(folder: Path, name: str, goes_on: bool) -> Job:
    summary = read_summary(folder) or NOTHING_KNOWN
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
    settings = {}
    for override in _overrides(folder) or summary["overrides"]:
        key, _, value = override.lstrip("+~").partition("=")
        if key not in NOT_SETTINGS:
            settings[key] = _short(value)
    return Job(folder, name, settings, summary)


def _short(value: str) -> str:
    """A value of 1e10 as 1e+10: a sweep's overrides have it as 10000000000.0."""
    short = f"{float(value):g}" if re.fullmatch(r"[0-9]{7,}\.0", value) else value
    return short if short == value or float(short) == float(value) else value


def _overrides(folder: Path) -> list[str]:
    try:
        found = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_bytes())
    except (OSError, yaml.YAMLError, ValueError):
        return []
    return [str(override) for override in found] if isinstance(found, list) else []


def swept_settings(jobs: list[Job]) -> list[str]:
    """The settings in which the jobs differ, in the order of the command line."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    return [name for name in names if len({job.settings.get(name) for job in jobs}) > 1]


def rank(jobs: list[Job]) -> list[Row]:
    """The jobs, the best first; finished ones that differ in their seed alone share a row."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        alike = tuple(sorted((key, value) for key, value in job.settings.items() if key != "seed"))
        groups.setdefault((alike, job.status == "finished" or job.name), []).append(job)
    return sorted((Row(group) for group in groups.values()), key=lambda row: row.place)
