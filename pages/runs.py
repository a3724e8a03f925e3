"""The page of runs: of one, with its texts and its heads as they grow, or of many, compared by curves and tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pages.kit import fill_page
from runs.directory import written_settings
from runs.metrics import Row, read_metrics
from runs.summary import NOTHING_KNOWN, NUMBERS, is_number, read_summary

T = TypeVar("T")
RECORD = "report.jsonl"
"""What a run notes for its page besides metrics.jsonl, a JSON object a line: how it began and went on, and of each
evaluation what the model wrote and, of some, maps of its heads."""
POINTS = 160  # of a curve: as many as a screen shows of one among many
POINTS_ALONE = 1200
MEASURED = ("loss", "val_loss", "val_bpb", "val_accuracy", "lr", "grad_norm", "tokens_per_s")
IN_SWEEPS = ("loss", "val_bpb", "val_accuracy")
FIGURES = ("attention_entropy", "attention_relative_entropy", "attention_distance", "head_similarity")
SAMPLES = 60  # evaluations whose texts are shown
MAP_LETTERS = 3_000_000  # of the page, for the maps of all evaluations


def runs_page(folder: Path, swept: list[str], runs: list[dict[str, Any]]) -> str:
    """Return the page of a folder's runs, best first, each as describe_run() gives it; `swept`: the varied settings."""
    return fill_page("runs.html", title_of(folder), {"settings": swept, "runs": runs})


def run_page(directory: Path) -> str:
    """Return the page of one run, of what its directory holds by now; it reloads itself until the run has ended."""
    summary, notes = read_summary(directory) or NOTHING_KNOWN, read_metrics(directory / RECORD)
    rows = read_metrics(directory / "metrics.jsonl")
    texts = [{"step": note["step"], "text": note["sample"]} for note in notes if note.get("sample")]
    alone = {
        "samples": spread(texts, SAMPLES), "heads": heads_of(notes, rows), "wanted": written_settings(directory),
        "begun": [note for note in notes if "command" in note],
    }  # fmt: skip
    run = describe_run(directory.resolve().name, rows, {}, summary, alone=True)
    return fill_page("runs.html", title_of(directory), {"settings": [], "runs": [run], "alone": alone})


def title_of(folder: Path) -> str:
    return "/".join(folder.resolve().parts[-2:])


def heads_of(notes: list[Row], rows: list[Row]) -> list[Row]:
    """Return maps and figures of the heads at as many evaluations as fit the page, spread evenly."""
    mapped = [note for note in notes if note.get("maps")]
    figures = {row["step"]: {name: row[name] for name in FIGURES if name in row} for row in rows if "val_loss" in row}
    most = MAP_LETTERS // max((len(note["maps"]) for note in mapped), default=1)
    known = ("step", "maps", "size", "heads", "tokens")
    return [
        {name: note[name] for name in known} | figures.get(note["step"], {}) for note in spread(mapped, max(2, most))
    ]


def spread(items: list[T], most: int) -> list[T]:
    """Return at most so many of the items, evenly, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def describe_run(
    name: str, rows: list[Row], settings: dict[str, str], summary: dict[str, Any], *, alone: bool = False
) -> dict[str, Any]:
    """Return what the page knows of a run: its settings, its summary and its curves of points (step, tokens, seconds,
    value), more of them where it stands alone."""
    kinds, points = (MEASURED, POINTS_ALONE) if alone else (IN_SWEEPS, POINTS)

    def curve(name: str) -> list[tuple[float, ...]]:
        found = [(row["step"], row.get("tokens"), row.get("seconds"), row.get(name)) for row in rows]
        return thin([point for point in found if all(map(is_number, point))], points)

    known = {field: summary[field] for field in ("status", "reason", "device", *NUMBERS)}
    return {"name": name, "settings": settings, "curves": {key: curve(key) for key in kinds}} | known


def thin(points: Sequence[tuple[Any, ...]], most: int = POINTS) -> list[tuple[float, ...]]:
    """Return at most so many points rounded to five digits, each the mean of its neighbours where there are more."""
    share = max(1.0, len(points) / most)
    groups = [points[round(i * share) : round((i + 1) * share)] for i in range(min(len(points), most))]
    return [tuple(float(f"{sum(values) / len(group):.5g}") for values in zip(*group, strict=True)) for group in groups]
