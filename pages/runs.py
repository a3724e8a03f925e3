"""The page of runs: of one, with its texts and its heads as they grow, or of many, compared by curves and tables."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from common.text import visible
from pages.kit import fill_page, shape
from runs.directory import written_settings
from runs.metrics import Row, is_number, read_metrics
from runs.summary import NUMBERS, Summary, read_summary

T = TypeVar("T")
RECORD = "report.jsonl"
"""What a run notes for its page besides metrics.jsonl, a JSON object a line: how it began and went on, and of each
evaluation what the model wrote and, of some, maps of its heads."""
CURVES = ("loss", "val_bpb", "val_accuracy")
CURVES_ALONE = (*CURVES, "val_loss", "lr", "grad_norm", "tokens_per_s", "skipped")
POINTS = 160  # of a curve among many, as many as a screen shows
POINTS_ALONE = 1200  # of a single run's
SAMPLES = 60  # evaluations whose texts are shown
MAPS = 40  # evaluations whose heads are shown


def runs_page(folder: Path, swept: list[str], runs: list[dict[str, Any]], rows: list[dict[str, Any]], best: int) -> str:
    """Return the page of a folder's runs.

    swept: the settings that vary. runs: the best first, each as describe_run() gives it, with the path of its own page
    from the folder as "page", or None. rows: those of the table, each with the names of its runs, which differ in
    their seed alone; the deviation of their result; and, of several, their mean figures. best: the best row's index.
    """
    first = folder / runs[0]["name"]
    values = {name: [*dict.fromkeys(run["settings"].get(name, "–") for run in runs)] for name in swept}
    shown = {name: ", ".join(several[:4]) + ", …" * (len(several) > 4) for name, several in values.items()}
    title = headline(written_settings(first) | shown, read_metrics(first / RECORD))
    data = {"folder": visible(folder), "settings": swept, "runs": runs, "rows": rows, "best": best}
    return fill_page("runs.html", title, data)


def run_page(directory: Path) -> str:
    """Return the page of one run, from its directory's present files; it reloads itself until the run has ended."""
    settings = written_settings(directory)
    notes = read_metrics(directory / RECORD)
    rows = read_metrics(directory / "metrics.jsonl")
    summary = asdict(read_summary(directory) or Summary())
    figures = {row["step"]: row for row in rows if "val_loss" in row}
    alone = {
        "samples": spread([{"step": at["step"], "text": at["sample"]} for at in notes if at.get("sample")], SAMPLES),
        "heads": spread([figures.get(at["step"], {}) | at | {"sample": None} for at in notes if at.get("maps")], MAPS),
        "begun": [note for note in notes if "command" in note],
        "wanted": settings,
    }
    run = describe_run(str(directory), rows, {}, summary, alone=True)
    table = [{"runs": [run["name"]]}]
    data = {"folder": visible(directory), "settings": [], "runs": [run], "rows": table, "best": 0, "alone": alone}
    return fill_page("runs.html", headline(settings, notes), data)


def headline(settings: dict[str, Any], notes: list[Row]) -> str:
    """Return what was trained on what, in a line; `notes`: of its RECORD."""
    attention = settings.get("attention") or settings.get("model.attention", "?")
    sizes = [settings.get(f"model.{name}", "?") for name in ("n_layer", "n_head", "n_embd")]
    text = next((note["text"] for note in notes if note.get("text")), settings.get("data.source", "?"))
    return f"{shape(attention, *sizes)}, on {visible(text)}"


def spread(items: list[T], most: int) -> list[T]:
    """Return at most so many of the items, evenly, with the first and the last."""
    few = min(most, len(items))
    return [items[round(i * (len(items) - 1) / max(1, few - 1))] for i in range(few)]


def describe_run(
    name: str, rows: list[Row], settings: dict[str, str], summary: dict[str, Any], *, alone: bool = False
) -> dict[str, Any]:
    """Return what the page knows of a run: its settings, its summary and its curves of points (step, tokens, seconds,
    value), more of them where it stands alone."""

    def curve(name: str) -> list[tuple[float, ...]]:
        found = [(row["step"], row.get("tokens"), row.get("seconds"), row.get(name)) for row in rows]
        return thin([point for point in found if all(map(is_number, point))], POINTS_ALONE if alone else POINTS)

    curves = {name: curve(name) for name in (CURVES_ALONE if alone else CURVES)}
    known = {field: summary[field] for field in ("status", "reason", "device", *NUMBERS)}
    return {"name": name, "settings": settings, "curves": curves} | known


def thin(points: Sequence[tuple[Any, ...]], most: int = POINTS) -> list[tuple[float, ...]]:
    """Return at most so many points rounded to five digits, each the mean of its neighbours where there are more: runs
    of one length keep the same steps, so that their curves have a mean."""
    size = max(1, -(-len(points) // most))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(float(f"{sum(values) / len(group):.5g}") for values in zip(*group, strict=True)) for group in groups]
