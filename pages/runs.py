"""The page of one run, with samples and attention heads, and parts of the page of many."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from common.text import visible
from pages.kit import fill_page, shape
from runs.directory import written_settings
from runs.metrics import Row, is_number, read_metrics
from runs.summary import Summary, read_summary

RECORD = "report.jsonl"
"""A run's file of JSON lines for its page, beside metrics.jsonl.

Each start writes a line with command and machine; each evaluation one with a sample, some with attention maps.
"""
CURVES = ("loss", "val_bpb", "val_accuracy")
CURVES_ALONE = (*CURVES, "val_loss", "lr", "grad_norm", "tokens_per_s", "skipped")
POINTS = 160  # of a curve on the page of many runs
POINTS_ALONE = 1200  # of a curve on the page of one run
SAMPLES = 60  # evaluations with their sample
MAPS = 40  # evaluations with their attention maps


def run_page(directory: Path | str) -> str:
    """Return the page of one run; it reloads itself until the run has ended."""
    directory = Path(directory)
    settings = written_settings(directory)
    notes = read_metrics(directory / RECORD)
    rows = read_metrics(directory / "metrics.jsonl")
    summary = read_summary(directory) or Summary()
    if summary.status == "running":
        summary = summary.at_last(rows)
    samples = [{"step": note["step"], "text": note["sample"]} for note in notes if note.get("sample")]
    # The maps of an evaluation, with its figures of the heads from metrics.jsonl.
    evaluations = {row["step"]: row for row in rows if "val_loss" in row}
    heads = [evaluations.get(note["step"], {}) | note | {"sample": None} for note in notes if note.get("maps")]
    run = describe_run(str(directory), rows, {}, asdict(summary), alone=True)
    data = {
        "folder": visible(directory),
        "settings": [],
        "runs": [run],
        "rows": [{"runs": [run["name"]]}],
        "best": 0,
        "alone": {
            "samples": spread(samples, SAMPLES),
            "heads": spread(heads, MAPS),
            "begun": [note for note in notes if note.get("command")],
            "wanted": settings,
        },
    }
    return fill_page("runs.html", headline(settings, notes), data)


def headline(settings: dict[str, Any], notes: list[Row]) -> str:
    """Return one line about a run: its model and its data. notes: the lines of its RECORD."""
    attention = settings.get("attention") or settings.get("model.attention", "?")
    sizes = [settings.get(f"model.{name}", "?") for name in ("n_layer", "n_head", "n_embd")]
    return f"{shape(attention, *sizes)}, on {text_of(settings, notes)}"


def text_of(settings: dict[str, Any], notes: list[Row]) -> str:
    """Return the description of a run's text in its RECORD, or the name of its data source."""
    return visible(next((note["text"] for note in notes if note.get("text")), settings.get("data.source", "?")))


def spread(items: list[Any], most: int) -> list[Any]:
    """Return at most `most` items at even distances, the first and the last among them."""
    count = min(most, len(items))
    distance = (len(items) - 1) / max(1, count - 1)
    return [items[round(i * distance)] for i in range(count)]


def describe_run(
    name: str,
    rows: list[Row],
    settings: dict[str, str],
    summary: dict[str, Any],
    *,
    alone: bool = False,
    longest: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the data of a run for the page: settings, summary, and curves.

    A point of a curve is (step, tokens, seconds, value). A value of None, for one that was not finite, is a gap. alone:
    whether it is the only run of the page, which then has more curves with more points. longest: longest_curves() of
    the runs of which the page draws one mean, which have the points of the longest.
    """
    curves = {}
    most = POINTS_ALONE if alone else POINTS
    neighbours = 1  # the most of which a point is the mean
    for metric in CURVES_ALONE if alone else CURVES:
        points = []
        for row in rows:
            place = (row["step"], row.get("tokens"), row.get("seconds"))
            if metric in row and all(map(is_number, place)):
                points.append((*place, row[metric] if is_number(row[metric]) else None))
        size = math.ceil(max(len(points), (longest or {}).get(metric, 0), 1) / most)
        curves[metric] = thin(points, size)
        neighbours = max(neighbours, size)
    return {"name": name, "settings": settings, "curves": curves, "neighbours": neighbours} | summary


def longest_curves(runs: Sequence[list[Row]]) -> dict[str, int]:
    """Return the most values that one of these runs has of each metric."""
    return {metric: max(sum(metric in row for row in rows) for rows in runs) for metric in CURVES}


def thin(points: Sequence[tuple[Any, ...]], size: int) -> list[tuple[float | None, ...]]:
    """Return points, rounded to five digits, as means of `size` neighbours.

    A mean is of the finite values; without any it is None. Runs of one size keep the same steps, so that the page can
    draw the mean of their curves.
    """
    thinned = []
    for start in range(0, len(points), size):
        columns = zip(*points[start : start + size], strict=True)
        known = [[value for value in column if value is not None] for column in columns]
        thinned.append(tuple(float(f"{fmean(values):.5g}") if values else None for values in known))
    return thinned
