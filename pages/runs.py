"""The report of a sweep: one page that opens offline, with every curve, heatmaps, the compute frontier and a table."""

from __future__ import annotations

import html
from functools import lru_cache
from pathlib import Path
from typing import Any

from pages.template import fill_page, script_value
from runs.metrics import read_metrics
from runs.summary import NUMBERS, is_number

POINTS = 160
"""Points of a curve: as many as a screen shows of one among many."""


def runs_page(sweep: Path, swept: list[str], runs: list[dict[str, Any]]) -> str:
    """Return the page of a sweep's runs, best first, each as describe_run() gives it; `swept`: the varied settings."""
    title = "/".join(sweep.resolve().parts[-2:])
    return fill_page("runs.html", TITLE=html.escape(title), DATA=script_value({"settings": swept, "runs": runs}))


def describe_run(name: str, directory: Path, settings: dict[str, str], summary: dict[str, Any]) -> dict[str, Any]:
    """Return what the page knows of a run: its settings, its summary and its curves."""
    metrics = directory / "metrics.jsonl"
    status = metrics.stat() if metrics.exists() else None
    return {
        "name": name,
        "status": summary["status"],
        "reason": summary["reason"],
        "settings": settings,
        "curves": read_curves(metrics, status and (status.st_size, status.st_mtime_ns)),
        **{number: summary[number] for number in NUMBERS},
    }


@lru_cache(maxsize=10_000)  # the page is made again after each job, and few curves have changed
def read_curves(metrics: Path, version: tuple[int, int] | None) -> dict[str, list[tuple[float, ...]]]:
    """Return a run's training loss and validation bits per byte: points (tokens, seconds, value)."""
    rows = read_metrics(metrics)
    points: dict[str, list[tuple[Any, ...]]] = {
        name: [(row.get("tokens"), row.get("seconds"), row.get(name)) for row in rows] for name in ("loss", "val_bpb")
    }
    return {name: thin([point for point in found if all(map(is_number, point))]) for name, found in points.items()}


def thin(points: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return at most POINTS points rounded to five digits, each the mean of its neighbours where there are more."""
    share = max(1.0, len(points) / POINTS)
    groups = [points[round(i * share) : round((i + 1) * share)] for i in range(min(len(points), POINTS))]
    return [tuple(float(f"{sum(values) / len(group):.5g}") for values in zip(*group, strict=True)) for group in groups]
