"""The leaderboard of a sweep, made from what its jobs left on the disk: rows, ranks, tables."""

from __future__ import annotations

import csv
import io
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from training.lock import is_locked
from training.metrics import read_metrics
from training.summary import NUMBERS, is_number, read_summary

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
    summary = read_summary(folder)
    if summary is None:
        summary = {"status": "running", "reason": None, "job": None, "overrides": []} | dict.fromkeys(NUMBERS)
    if summary["status"] == "running":
        prepares = goes_on and summary["step"] is None
        if (
            rows := read_metrics(folder / "metrics.jsonl")
        ) and not prepares:  # later than the evaluation that summary.json is from
            summary |= {name: rows[-1][name] for name in ("step", "tokens", "seconds") if is_number(rows[-1].get(name))}
        if not prepares and not is_locked(folder):
            reason = f"ended without a word after step {summary['step'] or 0}"
            summary |= {"status": "stopped", "reason": reason}
    settings = {}
    for override in _overrides(folder) or summary["overrides"]:
        key, _, value = override.lstrip("+~").partition("=")
        if key not in NOT_SETTINGS:
            settings[key] = value
    return Job(folder, name, settings, summary)


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


def table(jobs: list[Job]) -> list[list[str]]:
    """The leaderboard as text: a list of cells for the head and for every row."""
    swept = swept_settings(jobs)
    shown = [name for name in swept if name != "seed"]
    rows = rank(jobs)
    seeds = "seed" in swept
    alone = seeds and any(row.jobs[0].status != "finished" for row in rows)  # whose seed nobody could tell otherwise
    head = [*shown, *(["seed"] if alone else []), "parameters", "tokens", "tokens/s", "peak memory", "time"]
    cells = [[*head, "val bpb, mean ± sd (seeds)" if seeds else "val bpb"]]
    for row in rows:
        job = row.jobs[0]
        seed = [job.settings.get("seed", "") if job.status != "finished" else ""] if alone else []
        cells.append([*(job.settings.get(name, "–") for name in shown), *seed, *_measured(row), _result(row, seeds)])
    return cells


def _measured(row: Row) -> list[str]:
    speed, memory, seconds = (row.mean(name) for name in ("tokens_per_s", "peak_memory_mb", "seconds"))
    return [
        _short(row.mean("parameters")),
        _short(row.mean("tokens")),
        "–" if speed is None else f"{speed:,.0f}",
        "–" if memory is None else f"{memory:,.0f} MB",
        "–" if seconds is None else _duration(seconds),
    ]


def _result(row: Row, seeds: bool) -> str:
    job, bpb = row.jobs[0], row.mean("val_bpb")
    if job.status == "failed":
        return f"failed: {job.summary['reason'] or 'no reason was written'}"
    text = "–" if bpb is None else f"{bpb:.4f}"
    if job.status != "finished":
        return f"{text} ({job.status}, step {job.summary['step'] or 0})"
    deviation = row.deviation("val_bpb")
    return text + (f" ± {deviation:.4f}" if deviation is not None else "") + (f" ({len(row.jobs)})" if seeds else "")


def markdown(jobs: list[Job]) -> str:
    """The leaderboard as a table of Markdown, aligned so that it reads well as plain text."""
    cells = [[_escape(cell) for cell in row] for row in table(jobs)]
    # A failed job's reason is long: it does not set the width of its column.
    widths = [max(len(row[i]) for row in cells if not row[i].startswith("failed: ")) for i in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]) + "\n"


def comma_separated(jobs: list[Job]) -> str:
    """The leaderboard as CSV: a line a job, in its rank's order, with all digits; for rows of seeds, their mean too."""
    swept = swept_settings(jobs)
    measured = [name for name in NUMBERS if name not in swept]
    seeds = ["val_bpb_mean", "val_bpb_sd", "seeds"] if "seed" in swept else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "job", *swept, "status", *measured, *seeds, "reason"])
    for number, row in enumerate(rank(jobs), 1):
        over_seeds = [row.mean("val_bpb"), row.deviation("val_bpb"), len(row.jobs)] if seeds else []
        for job in row.jobs:
            settings = [job.settings.get(name) for name in swept]
            values = [job.summary[name] for name in measured]
            writer.writerow([number, job.name, *settings, job.status, *values, *over_seeds, job.summary["reason"]])
    return text.getvalue()


def _escape(cell: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    cell = " ".join(cell.split())
    return re.sub(r"([|*`\\])", r"\\\1", cell).replace("<", "&lt;")


def _short(number: float | None) -> str:
    if number is None:
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
