"""The report of a sweep: one page that opens offline, with every curve, heatmaps, the compute frontier and a table."""

from __future__ import annotations

import html
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from runs.metrics import read_metrics
from runs.summary import NUMBERS, is_number

POINTS = 160
"""Points of a curve: as many as a screen shows of one among many."""


def runs_page(sweep: Path, swept: list[str], runs: list[dict[str, Any]]) -> str:
    """The page of a sweep's runs, the best first, each as describe_run() gives it; `swept`: the settings that vary."""
    data = {"settings": swept, "runs": runs}
    page = Path(__file__).with_name("runs.html").read_text(encoding="utf-8")
    # "<" must not appear in the script: an override's value may well be </script>.
    content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    name = sweep.resolve()
    return page.replace("TITLE", html.escape("/".join(name.parts[-2:]))).replace("data = DATA;", f"data = {content};")


def describe_run(name: str, directory: Path, settings: dict[str, str], summary: dict[str, Any]) -> dict[str, Any]:
    """What the page knows of a run: its settings, its summary and its curves."""
    return {
        "name": name,
        "status": summary["status"],
        "reason": summary["reason"],
        "settings": settings,
        "curves": read_curves(directory, _version(directory / "metrics.jsonl")),
        **{number: summary[number] for number in NUMBERS},
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
