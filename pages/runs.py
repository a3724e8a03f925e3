"""The report of a sweep: one page that opens offline, with every curve, heatmaps, the compute frontier and a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages.template import fill_page
from runs.metrics import read_metrics
from runs.summary import NUMBERS, is_number

POINTS = 160  # of a curve: as many as a screen shows of one among many


def runs_page(sweep: Path, swept: list[str], runs: list[dict[str, Any]]) -> str:
    """Return the page of a sweep's runs, best first, each as describe_run() gives it; `swept`: the varied settings."""
    return fill_page("runs.html", "/".join(sweep.resolve().parts[-2:]), {"settings": swept, "runs": runs})


def describe_run(name: str, directory: Path, settings: dict[str, str], summary: dict[str, Any]) -> dict[str, Any]:
    """Return what the page knows of a run: its settings, its summary and its curves.

    A curve is of training loss or validation bits per byte: points (tokens, seconds, value).
    """
    rows = read_metrics(directory / "metrics.jsonl")

    def curve(name: str) -> list[tuple[float, ...]]:
        points = [(row.get("tokens"), row.get("seconds"), row.get(name)) for row in rows]
        return thin([point for point in points if all(map(is_number, point))])

    known = {field: summary[field] for field in ("status", "reason", *NUMBERS)}
    return {"name": name, "settings": settings, "curves": {key: curve(key) for key in ("loss", "val_bpb")}} | known


def thin(points: Sequence[tuple[Any, ...]]) -> list[tuple[float, ...]]:
    """Return at most POINTS points rounded to five digits, each the mean of its neighbours where there are more."""
    share = max(1.0, len(points) / POINTS)
    groups = [points[round(i * share) : round((i + 1) * share)] for i in range(min(len(points), POINTS))]
    return [tuple(float(f"{sum(values) / len(group):.5g}") for values in zip(*group, strict=True)) for group in groups]
