"""The leaderboard of a sweep: its table, and the files that it is written to."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Callable
from pathlib import Path

from data.files import replacing
from pages.runs import describe_run, runs_page
from runs.formatting import duration, si
from runs.summary import NUMBERS
from sweeps.jobs import Job, Row, rank, swept_settings

log = logging.getLogger("tinygpt")

MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {
    "parameters": ("parameters", lambda number: si(number, 3, "")),
    "tokens": ("tokens", lambda number: si(number, 3, "")),
    "tokens/s": ("tokens_per_s", "{:,.0f}".format),
    "peak memory": ("peak_memory_mb", "{:,.0f} MB".format),
    "time": ("seconds", duration),
}
"""The columns of figures: each one's name in summary.json, and how it is shown."""


def write_leaderboard(sweep: Path, jobs: list[Job]) -> str:
    """Write leaderboard.csv, leaderboard.md and report.html into a sweep's folder.

    Returns the table and where to find it, for the terminal; "" where there are no jobs, and nothing to write.
    """
    if not jobs:
        return ""
    table = markdown(jobs)
    ranked = [job for row in rank(jobs) for job in row.jobs]
    runs = [describe_run(job.name, job.directory, job.settings, job.summary) for job in ranked]
    files = {
        "leaderboard.csv": comma_separated(jobs),
        "leaderboard.md": table,
        "report.html": runs_page(sweep, swept_settings(jobs), runs),
    }
    for name, text in files.items():
        try:
            with replacing(sweep / name) as file:
                file.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            log.error("%s cannot be written (%s).", sweep / name, error)
    return f"{table}\ntable     {sweep / 'leaderboard.md'}\ncurves    {sweep / 'report.html'}"


def table(jobs: list[Job]) -> list[list[str]]:
    """The leaderboard as text: a list of cells for the head and for every row."""
    swept = swept_settings(jobs)
    shown = [name for name in swept if name != "seed"]
    rows = rank(jobs)
    seeds = "seed" in swept
    alone = seeds and any(row.jobs[0].status != "finished" for row in rows)  # whose seed nobody could tell otherwise
    measured = [name for name in MEASURED if name != "peak memory" or any(row.mean("peak_memory_mb") for row in rows)]
    head = [*shown, *(["seed"] if alone else []), *measured]
    cells = [[*head, "val bpb, mean ± sd (seeds)" if seeds else "val bpb"]]
    for row in rows:
        job = row.jobs[0]
        seed = [job.settings.get("seed", "") if job.status != "finished" else ""] if alone else []
        figures = (_mean(row, *MEASURED[name]) for name in measured)
        cells.append([*(job.settings.get(name, "–") for name in shown), *seed, *figures, _result(row, seeds)])
    return cells


def _mean(row: Row, name: str, show: Callable[[float], str]) -> str:
    mean = row.mean(name)
    return "–" if mean is None else show(mean)


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
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines + _warning(swept_settings(jobs))) + "\n"


def _warning(swept: list[str]) -> list[str]:
    """Lines that keep the reader from comparing bits per byte of different texts, where the sweep varies the text."""
    names = ", ".join(name for name in swept if name.split(".")[0] == "data" and name != "data.cache_dir")
    return ["", f"The rows were scored on different texts ({names}): compare only those of the same."] if names else []


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
