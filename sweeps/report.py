"""The report of a sweep: one page that opens offline, with every curve, heatmaps, the compute frontier and a table."""

from __future__ import annotations

import html
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from sweeps.jobs import Job, rank, swept_settings
from training.metrics import read_metrics
from training.summary import NUMBERS, is_number

POINTS = 160
"""Points of a curve: as many as a screen shows of one among many."""


def html_report(sweep: Path, jobs: list[Job]) -> str:
    """The page of a sweep's jobs."""
    data = {
        "settings": swept_settings(jobs),
        "runs": [describe_job(job) for row in rank(jobs) for job in row.jobs],
    }
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    # "<" must not appear in the script: an override's value may well be </script>.
    content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    name = sweep.resolve()
    return page.replace("TITLE", html.escape("/".join(name.parts[-2:]))).replace("data = DATA;", f"data = {content};")


def describe_job(job: Job) -> dict[str, Any]:
    """What the page knows of a job: its settings, its summary and its curves."""
    return {
        "name": job.name,
        "status": job.status,
        "reason": job.summary["reason"],
        "settings": job.settings,
        "curves": read_curves(job.directory, _version(job.directory / "metrics.jsonl")),
        **{name: job.summary[name] for name in NUMBERS},
    }


@lru_cache(maxsize=10_000)  # the page is made anew after each job, most of whose curves are as they were
def read_curves(run: Path, version: tuple[int, int]) -> dict[str, list[tuple[float, ...]]]:
    """Training loss and validation bits per byte of a run: points (tokens, seconds, value)."""
    rows = read_metrics(run / "metrics.jsonl")
    return {
        name: thin([(row["tokens"], row["seconds"], row[name]) for row in rows if _has(row, name)])
        for name in ("loss", "val_bpb")
    }


def _version(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _has(row: dict[str, Any], name: str) -> bool:
    return all(is_number(row.get(key)) for key in (name, "tokens", "seconds"))


def thin(points: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """At most POINTS points, each the mean of its neighbours where there are more, rounded to five digits."""
    share = max(1.0, len(points) / POINTS)
    groups = [points[round(i * share) : round((i + 1) * share)] for i in range(min(len(points), POINTS))]
    return [tuple(float(f"{sum(values) / len(group):.5g}") for values in zip(*group, strict=True)) for group in groups]
