"""The leaderboard of a sweep: its table, and the files that it is written to."""

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

# The columns of figures: each one's name in summary.json, and how it is shown.
MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {
    "parameters": ("parameters", lambda number: si(number, 3, "")),
    "tokens": ("tokens", lambda number: si(number, 3, "")),
    "tokens/s": ("tokens_per_s", "{:,.0f}".format),
    "peak memory": ("peak_memory_mb", "{:,.0f} MB".format),
    "time": ("seconds", duration),
}


def write_leaderboard(sweep: Path, jobs: list[Job]) -> str:
    """Write leaderboard.csv, leaderboard.md and report.html into a sweep's folder.

    Returns the table and where to find it, for the terminal; "" where there are no jobs, and nothing to write.
    """
    if not jobs:
        return ""
    ranked = [job for row in rank(jobs) for job in row.jobs]
    runs = [describe_run(job.name, job.directory, job.settings, job.summary) for job in ranked]
    files = {
        "leaderboard.csv": comma_separated(jobs),
        "leaderboard.md": markdown(jobs),
        "report.html": runs_page(sweep, swept_settings(jobs), runs),
    }
    for name, text in files.items():
        try:
            with replacing(sweep / name) as file:
                file.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            log.error("%s cannot be written (%s).", sweep / name, error)
    return f"{markdown(jobs)}\ntable     {sweep / 'leaderboard.md'}\ncurves    {sweep / 'report.html'}"


def markdown(jobs: list[Job]) -> str:
    """Return the leaderboard as a table of Markdown, aligned so that it reads well as plain text."""
    rows, swept = rank(jobs), swept_settings(jobs)
    shown = [name for name in swept if name != "seed"]
    seeds = "seed" in swept
    # A row that is not the mean of all seeds names its own.
    own_seed = ["seed"] if seeds and any(row.jobs[0].status != "finished" for row in rows) else []
    measured = [name for name in MEASURED if name != "peak memory" or any(row.mean("peak_memory_mb") for row in rows)]
    table = [[*shown, *own_seed, *measured, "val bpb, mean ± sd (seeds)" if seeds else "val bpb"]]
    for row in rows:
        settings, is_done = row.jobs[0].settings, row.jobs[0].status == "finished"
        cells = [settings.get(name, "–") for name in shown]
        cells += ["" if is_done else settings.get(name, "") for name in own_seed]
        for key, show in (MEASURED[name] for name in measured):
            cells.append("–" if (mean := row.mean(key)) is None else show(mean))
        table.append([*cells, _result(row, seeds)])
    table = [[_escape(cell) for cell in cells] for cells in table]
    # A failed job's reason is long: it does not set the width of its column.
    widths = [
        max(len(cell) for cell in column if not cell.startswith("failed: ")) for column in zip(*table, strict=True)
    ]
    lines = [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    if texts := ", ".join(name for name in swept if name.split(".")[0] == "data" and name != "data.cache_dir"):
        lines += ["", f"The rows were scored on different texts ({texts}): compare only those of the same."]
    return "\n".join(lines) + "\n"


def _result(row: Row, seeds: bool) -> str:
    job, bpb, deviation = row.jobs[0], row.mean("val_bpb"), row.deviation("val_bpb")
    if job.status == "failed":
        return f"failed: {job.summary['reason'] or 'no reason was written'}"
    text = "–" if bpb is None else f"{bpb:.4f}"
    if job.status != "finished":
        return f"{text} ({job.status}, step {job.summary['step'] or 0})"
    return text + (f" ± {deviation:.4f}" if deviation is not None else "") + (f" ({len(row.jobs)})" if seeds else "")


def _escape(cell: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    return re.sub(r"([|*`\\])", r"\\\1", " ".join(cell.split())).replace("<", "&lt;")


def comma_separated(jobs: list[Job]) -> str:
    """Return the leaderboard as CSV: a line a job, ranked, with all digits; for rows of seeds, their mean too."""
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
