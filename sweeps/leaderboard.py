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

from data.files import replace_text
from pages.runs import describe_run, runs_page
from runs.directory import OF_THIS_INVOCATION, is_locked, written_settings
from runs.formatting import duration, si
from runs.metrics import read_metrics
from runs.summary import JOB, NOTHING_KNOWN, NUMBERS, JobRecord, is_number, read_job, read_summary
from runs.summary import NAME as SUMMARY

log = logging.getLogger("tinygpt")
PAGE = "report.html"

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
    """Return the jobs in a sweep's folder in the order of their numbers; what cannot be read is passed over.

    Without jobs, all runs below the folder, with the settings that they were saved with.
    """
    folders = [path.parent for path in sweep.glob(f"*/**/{JOB}")]
    found = [(record, folder) for folder in folders if (record := read_job(folder))]
    if not folders:
        runs = sorted(path.parent for path in sweep.glob(f"*/**/{SUMMARY}"))
        found = [(JobRecord(number, settings_of(run)), run) for number, run in enumerate(runs)]
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


def settings_of(run: Path) -> list[str]:
    """Return the settings that a run was written with as NAME=VALUE, but those of where and how it was watched."""
    groups = (*OF_THIS_INVOCATION, "wandb", "data.cache_dir")
    own = tuple(f"{group}." for group in groups)
    return [f"{name}={value}" for name, value in written_settings(run).items() if not f"{name}.".startswith(own)]


def shortened(value: str) -> str:
    """Return a value of 1e10 as 1e+10: a sweep's overrides have it as 10000000000.0."""
    short = f"{float(value):g}" if re.fullmatch(r"[0-9]{7,}\.0", value) else value
    return short if short == value or float(short) == float(value) else value


def swept_settings(jobs: list[Job]) -> list[str]:
    """Return the settings in which the jobs differ, in the order of the command line."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    return [name for name in names if len({job.settings.get(name) for job in jobs}) > 1]


def rank(jobs: list[Job]) -> list[Row]:
    """Return rows of jobs: finished by their result, those of other seeds in one, then under way, then failed."""
    rows: dict[Any, Row] = {}
    for job in jobs:
        alike = tuple(sorted((key, value) for key, value in job.settings.items() if key != "seed"))
        rows.setdefault((alike, job.status == "finished" or job.name), []).append(job)

    result, worst = result_of(jobs), float("inf")

    def place(row: Row) -> tuple[bool, bool, float, float]:
        reached, loss = mean(row, result), mean(row, "val_loss")
        cost = worst if reached is None else -reached if result == "val_accuracy" else reached
        return row[0].status == "failed", row[0].status != "finished", cost, worst if loss is None else loss

    return sorted(rows.values(), key=place)


def result_of(jobs: list[Job]) -> str:
    """Return what ranks the jobs: val_accuracy, the more the better, where one has learned a task, else val_bpb."""
    return "val_accuracy" if values(jobs, "val_accuracy") else "val_bpb"


def values(row: Row, name: str) -> list[float]:
    return [job.summary[name] for job in row if job.summary[name] is not None]


def mean(row: Row, name: str) -> float | None:
    return statistics.fmean(values(row, name)) if values(row, name) else None


def deviation(row: Row, result: str) -> float | None:
    """Return the standard deviation of the sample (n - 1) of a result; None for a single job."""
    return statistics.stdev(values(row, result)) if len(values(row, result)) > 1 else None


def write_leaderboard(sweep: Path) -> str:
    """Write leaderboard.csv, leaderboard.md and report.html; return what to print of them, "" without jobs."""
    if not (jobs := read_jobs(sweep)):
        return ""
    ranked = [job for row in rank(jobs) for job in row]
    page = runs_page(sweep, swept_settings(jobs), [described(job) for job in ranked])
    table = markdown(jobs)
    files = {"leaderboard.csv": comma_separated(jobs), "leaderboard.md": table, PAGE: page}
    for name, text in files.items():
        try:
            replace_text(sweep / name, text)
        except OSError as error:
            log.error("%s cannot be written (%s).", sweep / name, error)
    return f"{table}\ntable     {sweep / 'leaderboard.md'}\ncurves    {sweep / PAGE}"


def described(job: Job) -> dict[str, Any]:
    run = describe_run(job.name, read_metrics(job.directory / "metrics.jsonl"), job.settings, job.summary)
    return run | {"page": f"{job.name}/{PAGE}" if (job.directory / PAGE).is_file() else None}


def markdown(jobs: list[Job]) -> str:
    """Return the leaderboard as a table of Markdown, aligned so that it reads well as plain text."""
    rows, swept = rank(jobs), swept_settings(jobs)
    shown, seeds = [name for name in swept if name != "seed"], "seed" in swept
    # A row that is not the mean of all seeds names its own.
    own_seed = ["seed"] if seeds and any(row[0].status != "finished" for row in rows) else []
    measured = [name for name, (key, _) in MEASURED.items() if values(jobs, key)]
    title = (result := result_of(jobs)).replace("_", " ")
    table = [[*shown, *own_seed, *measured, f"{title}, mean ± sd (seeds)" if seeds else title]]
    for row in rows:
        settings, is_done = row[0].settings, row[0].status == "finished"
        cells = [settings.get(name, "–") for name in shown]
        cells += ["" if is_done else settings.get(name, "") for name in own_seed]
        for key, show in (MEASURED[name] for name in measured):
            cells.append("–" if (figure := mean(row, key)) is None else show(figure))
        table.append([*cells, _result(row, result, seeds)])
    lines = markdown_lines(table)
    if texts := ", ".join(name for name in swept if name.split(".")[0] == "data" and name != "data.cache_dir"):
        lines += ["", f"The rows were scored on different texts ({texts}): compare only those of the same."]
    return "\n".join(lines) + "\n"


def markdown_lines(table: list[list[str]]) -> list[str]:
    """Return the lines of a table, its head first, in Markdown that shows each cell as it is."""
    table = [[re.sub(r"([|*`\\])", r"\\\1", " ".join(c.split())).replace("<", "&lt;") for c in line] for line in table]
    # A failed job's reason is long: it does not set the width of its column.
    widths = [max(len(c) for c in column if not c.startswith("failed: ")) for column in zip(*table, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in table]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _result(row: Row, result: str, seeds: bool) -> str:
    status, summary, reached, spread = row[0].status, row[0].summary, mean(row, result), deviation(row, result)
    if status == "failed":
        return f"failed: {summary['reason'] or 'no reason was written'}"
    text = "–" if reached is None else f"{reached:.4f}"
    if status != "finished":
        return f"{text} ({status}, step {summary['step'] or 0})"
    return text + (f" ± {spread:.4f}" if spread is not None else "") + (f" ({len(row)})" if seeds else "")


def comma_separated(jobs: list[Job]) -> str:
    """Return the leaderboard as CSV: a line a job, ranked, with all digits; for rows of seeds, their mean too."""
    swept = swept_settings(jobs)
    measured = [name for name in NUMBERS if name not in swept]
    result = result_of(jobs)
    seeds = [f"{result}_mean", f"{result}_sd", "seeds"] if "seed" in swept else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "job", *swept, "status", *measured, *seeds, "reason"])
    for number, row in enumerate(rank(jobs), 1):
        over_seeds = [mean(row, result), deviation(row, result), len(row)] if seeds else []
        for job in row:
            settings = [job.settings.get(name) for name in swept]
            figures = [job.summary[name] for name in measured]
            writer.writerow([number, job.name, *settings, job.status, *figures, *over_seeds, job.summary["reason"]])
    return text.getvalue()
