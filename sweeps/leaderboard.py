"""The leaderboard of a sweep: what its jobs left on the disk, ranked, as a table, a CSV file and a page."""

import csv
import io
import logging
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import replacing
from pages.runs import describe_run, runs_page
from runs.directory import is_locked
from runs.formatting import duration, si
from runs.metrics import read_metrics
from runs.summary import JOB, NOTHING_KNOWN, NUMBERS, is_number, read_job, read_summary

log = logging.getLogger("tinygpt")

MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {  # columns: the name in summary.json, how it is shown
    "parameters": ("parameters", lambda number: si(number, 3, "")),
    "tokens": ("tokens", lambda number: si(number, 3, "")),
    "tokens/s": ("tokens_per_s", "{:,.0f}".format),
    "decode tokens/s": ("decode_tokens_per_s", "{:,.0f}".format),
    "cache B/token": ("cache_bytes_per_token", "{:,.0f}".format),
    "peak memory": ("peak_memory_mb", "{:,.0f} MB".format),
    "time": ("seconds", duration),
    "± documents": ("val_bpb_stderr", "{:.4f}".format),  # the standard error of the result
}


@dataclass
class Job:
    """One job of a sweep: its folder, the folder's name below the sweep's, its overrides by name, its summary.json."""

    directory: Path
    name: str
    settings: dict[str, str]
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        return self.summary["status"]


Row = list[Job]
"""Jobs that differ in nothing but their seed, or a single one."""


def read_jobs(sweep: Path) -> list[Job]:
    """Return the jobs in a sweep's folder in the order of their numbers; what cannot be read is passed over."""
    folders = [path.parent for path in sweep.glob(f"*/**/{JOB}")]
    found = [(record, folder) for folder in folders if (record := read_job(folder))]
    jobs = []
    for record, folder in sorted(found, key=lambda pair: (pair[0].number, pair[1])):
        summary = read_summary(folder) or NOTHING_KNOWN
        if record.reason:
            summary = summary | {"status": "failed", "reason": record.reason}
        elif summary["status"] == "running" and (summary["step"] is not None or not is_locked(sweep)):  # none prepares
            if rows := read_metrics(folder / "metrics.jsonl"):  # later than what summary.json is from
                known = ("step", "tokens", "seconds")
                summary = summary | {name: rows[-1][name] for name in known if is_number(rows[-1].get(name))}
            if not is_locked(folder):
                reason = f"ended without a word after step {summary['step'] or 0}"
                summary = summary | {"status": "stopped", "reason": reason}
        if summary["device"] == "cpu":  # there jobs share a process, which keeps in pieces what those before it took
            summary = summary | {"peak_memory_mb": None}
        pairs = [override.lstrip("+~").partition("=") for override in record.overrides]
        settings = {key: shortened(value) for key, _, value in pairs}
        jobs.append(Job(folder, folder.relative_to(sweep).as_posix(), settings, summary))
    return jobs


def shortened(value: str) -> str:
    """Return a value of 1e10 as 1e+10: a sweep's overrides have it as 10000000000.0."""
    short = f"{float(value):g}" if re.fullmatch(r"[0-9]{7,}\.0", value) else value
    return short if short == value or float(short) == float(value) else value


def swept_settings(jobs: list[Job]) -> list[str]:
    """Return the settings in which the jobs differ, in the order of the command line."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    return [name for name in names if len({job.settings.get(name) for job in jobs}) > 1]


def rank(jobs: list[Job]) -> list[Row]:
    """Return rows of jobs: finished by bits per byte, those of other seeds in one, then under way, then failed."""
    rows: dict[Any, Row] = {}
    for job in jobs:
        alike = tuple(sorted((key, value) for key, value in job.settings.items() if key != "seed"))
        rows.setdefault((alike, job.status == "finished" or job.name), []).append(job)

    def place(row: Row) -> tuple[bool, bool, float]:
        return row[0].status == "failed", row[0].status != "finished", mean(row, "val_bpb") or float("inf")

    return sorted(rows.values(), key=place)


def values(row: Row, name: str) -> list[float]:
    return [job.summary[name] for job in row if job.summary[name] is not None]


def mean(row: Row, name: str) -> float | None:
    return statistics.fmean(values(row, name)) if values(row, name) else None


def deviation(row: Row) -> float | None:
    """Return the standard deviation of the sample (n - 1) of bits per byte; None for a single job."""
    return statistics.stdev(values(row, "val_bpb")) if len(values(row, "val_bpb")) > 1 else None


def write_leaderboard(sweep: Path) -> str:
    """Write leaderboard.csv, leaderboard.md and report.html; return what to print of them, "" without jobs."""
    if not (jobs := read_jobs(sweep)):
        return ""
    ranked = [job for row in rank(jobs) for job in row]
    runs = [describe_run(job.name, job.directory, job.settings, job.summary) for job in ranked]
    page = runs_page(sweep, swept_settings(jobs), runs)
    files = {"leaderboard.csv": comma_separated(jobs), "leaderboard.md": markdown(jobs), "report.html": page}
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
    shown, seeds = [name for name in swept if name != "seed"], "seed" in swept
    # A row that is not the mean of all seeds names its own.
    own_seed = ["seed"] if seeds and any(row[0].status != "finished" for row in rows) else []
    measured = [name for name, (key, _) in MEASURED.items() if values(jobs, key)]
    table = [[*shown, *own_seed, *measured, "val bpb, mean ± sd (seeds)" if seeds else "val bpb"]]
    for row in rows:
        settings, is_done = row[0].settings, row[0].status == "finished"
        cells = [settings.get(name, "–") for name in shown]
        cells += ["" if is_done else settings.get(name, "") for name in own_seed]
        for key, show in (MEASURED[name] for name in measured):
            cells.append("–" if (figure := mean(row, key)) is None else show(figure))
        table.append([*cells, _result(row, seeds)])
    # In Markdown each cell is shown as it is, in one line.
    table = [[re.sub(r"([|*`\\])", r"\\\1", " ".join(c.split())).replace("<", "&lt;") for c in line] for line in table]
    # A failed job's reason is long: it does not set the width of its column.
    widths = [max(len(c) for c in column if not c.startswith("failed: ")) for column in zip(*table, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    if texts := ", ".join(name for name in swept if name.split(".")[0] == "data" and name != "data.cache_dir"):
        lines += ["", f"The rows were scored on different texts ({texts}): compare only those of the same."]
    return "\n".join(lines) + "\n"


def _result(row: Row, seeds: bool) -> str:
    status, summary, bpb, spread = row[0].status, row[0].summary, mean(row, "val_bpb"), deviation(row)
    if status == "failed":
        return f"failed: {summary['reason'] or 'no reason was written'}"
    text = "–" if bpb is None else f"{bpb:.4f}"
    if status != "finished":
        return f"{text} ({status}, step {summary['step'] or 0})"
    return text + (f" ± {spread:.4f}" if spread is not None else "") + (f" ({len(row)})" if seeds else "")


def comma_separated(jobs: list[Job]) -> str:
    """Return the leaderboard as CSV: a line a job, ranked, with all digits; for rows of seeds, their mean too."""
    swept = swept_settings(jobs)
    measured = [name for name in NUMBERS if name not in swept]
    seeds = ["val_bpb_mean", "val_bpb_sd", "seeds"] if "seed" in swept else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "job", *swept, "status", *measured, *seeds, "reason"])
    for number, row in enumerate(rank(jobs), 1):
        over_seeds = [mean(row, "val_bpb"), deviation(row), len(row)] if seeds else []
        for job in row:
            settings = [job.settings.get(name) for name in swept]
            figures = [job.summary[name] for name in measured]
            writer.writerow([number, job.name, *settings, job.status, *figures, *over_seeds, job.summary["reason"]])
    return text.getvalue()
