"""The leaderboard of a sweep: ranked results as a table, a CSV file and a page."""

import csv
import io
import logging
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import os_error_reason
from common.files import is_locked, replace_text
from common.text import duration, si, visible
from pages.kit import fill_page
from pages.runs import RECORD, describe_run, headline
from runs.directory import OF_THIS_INVOCATION, written_settings
from runs.metrics import is_number, read_metrics
from runs.summary import JOB, NUMBERS, JobRecord, Summary, read_job, read_summary
from runs.summary import NAME as SUMMARY

log = logging.getLogger("tinygpt")
PAGE = "report.html"

# {format of a figure: its function}, as in pages/runs.html.
FORMATS = {
    "number": lambda figure: f"{figure:.4f}",
    "grouped": lambda figure: f"{figure:,.0f}",
    "short": lambda figure: si(figure, 3, ""),
    "duration": duration,
}


class Column(NamedTuple):
    """A column of the table."""

    title: str
    field: str
    """Its field in Summary."""
    format: str
    larger: bool = False
    """Whether more is better."""
    timed: bool = False
    """Whether it changes with the load of the machine."""
    page_only: bool = False
    """Whether leaderboard.md goes without it."""


# Besides the result: the result is the last column here, and the second of the page.
COLUMNS = (
    Column("± documents", "val_bpb_stderr", "number"),  # the standard error of the result
    Column("scored", "val_tokens", "grouped"),  # targets or answers that the result rests on
    Column("val loss", "val_loss", "number", page_only=True),
    Column("parameters", "parameters", "short"),
    Column("tokens", "tokens", "short"),
    Column("FLOPs", "flops", "short", page_only=True),
    Column("tokens/s", "tokens_per_s", "grouped", larger=True, timed=True),
    Column("decode tokens/s", "decode_tokens_per_s", "grouped", larger=True, timed=True),
    Column("cache B/token", "cache_bytes_per_token", "grouped"),
    Column("peak MB", "peak_memory_mb", "grouped"),
    Column("time", "seconds", "duration", timed=True),
)
# Signs by which Markdown may turn a text into a link, an image, HTML or another font.
ACTIVE = re.compile(r"[^\w\s.,;:+/=%()±–×'\"<-]|<[A-Za-z/!?]|://|www\.|\b_|_\b")


@dataclass
class Job:
    """One job of a sweep."""

    directory: Path
    name: str
    """The path of its folder below the sweep's."""
    settings: dict[str, str]
    """Its overrides by name."""
    summary: Summary

    @property
    def status(self) -> str:
        return self.summary.status


Group = list[Job]
"""The jobs of a row of the leaderboard, which differ in nothing but their seed."""


def read_jobs(sweep: Path) -> list[Job]:
    """Return the jobs in a sweep's folder by number; without jobs, all runs below it."""
    # Read the records of the jobs, by folder.
    found = {path.parent: read_job(path.parent) or unreadable(path) for path in sweep.glob(f"*/**/{JOB}")}
    if not found:
        for path in sweep.glob(f"*/**/{SUMMARY}"):
            own = settings_of(path.parent)
            found[path.parent] = JobRecord(0, own) if own else unreadable(path.with_name("config.yaml"))

    # Add their settings and summaries.
    is_going_on = is_locked(sweep / ".lock")
    jobs = []
    for folder, record in sorted(found.items(), key=lambda pair: (pair[1].number, pair[0])):
        pairs = [override.lstrip("+~").partition("=") for override in record.overrides]
        # Write 10000000000.0, as Hydra has it for 1e10, as 1e+10.
        settings = {
            name: f"{float(value):g}" if re.fullmatch(r"[0-9]{1,3}0{6,30}\.0", value) else value
            for name, _, value in pairs
        }
        summary = summary_of(folder, record.reason, is_going_on)
        jobs.append(Job(folder, folder.relative_to(sweep).as_posix(), settings, summary))
    return jobs


def unreadable(file: Path) -> JobRecord:
    return JobRecord(sys.maxsize, [], f"{file.parent.name}/{file.name} cannot be read")


def summary_of(folder: Path, reason: str | None, is_going_on: bool) -> Summary:
    """Return the summary of a job's folder, corrected if it cannot be true.

    The job has failed if there is a `reason`, and has stopped if its process is gone.
    """
    found = read_summary(folder)
    if found is None and os.path.lexists(folder / SUMMARY):
        reason = reason or f"{SUMMARY} cannot be read"
    summary = found or Summary()
    # On a CPU the jobs share a process, whose allocator keeps the memory of earlier jobs.
    if summary.device == "cpu":
        summary = replace(summary, peak_memory_mb=None)
    if reason:
        return replace(summary, status="failed", reason=reason)
    # A job without a step still prepares its text, if the sweep goes on.
    if summary.status != "running" or (summary.step is None and is_going_on):
        return summary
    # The last row of metrics.jsonl may be later than summary.json.
    for row in read_metrics(folder / "metrics.jsonl")[-1:]:
        summary = replace(
            summary, **{name: row[name] for name in ("step", "tokens", "flops", "seconds") if is_number(row.get(name))}
        )
    if is_locked(folder / ".lock"):
        return summary
    return replace(summary, status="stopped", reason=f"ended without a word after step {summary.step or 0}")


def settings_of(run: Path) -> list[str]:
    """Return a run's settings as NAME=VALUE, but for its folders and its loggers."""
    own = tuple(f"{group}." for group in (*OF_THIS_INVOCATION, "wandb", "data.cache_dir"))
    return [f"{name}={value}" for name, value in written_settings(run).items() if not f"{name}.".startswith(own)]


def swept_settings(jobs: list[Job]) -> list[str]:
    """Return the settings in which the jobs differ, in the order of the command line."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    return [name for name in names if len({job.settings.get(name) for job in jobs}) > 1]


def rank(jobs: list[Job]) -> list[Group]:
    """Return groups of jobs that differ in their seed alone, the best first.

    Finished ones come by their mean result over seeds, then those under way, then failed ones.
    """
    # Only finished jobs are grouped; any other is a group alone.
    groups: dict[Any, Group] = {}
    for job in jobs:
        but_seed = frozenset((name, value) for name, value in job.settings.items() if name != "seed")
        groups.setdefault((but_seed, job.status == "finished" or job.name), []).append(job)
    result = result_of(jobs)
    places = {"finished": 0, "failed": 2}
    return sorted(groups.values(), key=lambda group: (places.get(group[0].status, 1), cost(group, result)))


def result_of(jobs: list[Job]) -> str:
    """Return the figure that ranks the jobs: val_accuracy of a task, else a loss."""
    return next((name for name in ("val_accuracy", "val_bpb", "val_loss") if values(jobs, name)), "val_bpb")


def values(group: Group, name: str) -> list[float]:
    return [figure for job in group if (figure := getattr(job.summary, name)) is not None]


def mean(group: Group, name: str) -> float | None:
    known = values(group, name)
    return statistics.fmean(known) if known else None


def deviation(group: Group, name: str) -> float | None:
    """Return the standard deviation of a figure over seeds (n - 1), None for fewer than two."""
    known = values(group, name)
    return statistics.stdev(known) if len(known) > 1 else None


def cost(group: Group, result: str) -> float:
    """Return a group's mean result, negated if more is better; infinite without a result."""
    reached = mean(group, result)
    if reached is None:
        return math.inf
    return -reached if result == "val_accuracy" else reached


def write_leaderboard(sweep: Path) -> str:
    """Write leaderboard.csv, leaderboard.md and report.html; return the text to print.

    Without jobs it is empty.
    """
    jobs = read_jobs(sweep)
    if not jobs:
        return ""
    table = markdown(jobs)
    page = leaderboard_page(sweep, jobs)
    for name, text in {"leaderboard.csv": comma_separated(jobs), "leaderboard.md": table, PAGE: page}.items():
        try:
            replace_text(sweep / name, text)
        except OSError as error:
            log.error("%s cannot be written (%s).", sweep / name, os_error_reason(error))
    return f"{table}\ntable     {sweep / 'leaderboard.md'}\ncurves    {sweep / PAGE}"


def leaderboard_page(sweep: Path, jobs: list[Job]) -> str:
    """Return the page of a sweep, which draws the ranking made here."""
    groups = rank(jobs)
    swept = swept_settings(jobs)
    result = result_of(jobs)

    # Describe the runs, the best first, with their curves.
    runs = []
    for job in chain.from_iterable(groups):
        rows = read_metrics(job.directory / "metrics.jsonl")
        run = describe_run(job.name, rows, job.settings, asdict(job.summary))
        has_page = (job.directory / PAGE).is_file()
        runs.append(run | {"page": f"{job.name}/{PAGE}" if has_page else None})

    # Fill the lines of the table: each is a run, or the means over seeds.
    shown = [group for group in groups if group[0].status != "failed"]
    lines: list[dict[str, Any]] = []
    for group in shown:
        figures = {name: mean(group, name) for name in NUMBERS} if len(group) > 1 else {}
        lines.append(figures | {"runs": [job.name for job in group], "deviation": deviation(group, result)})
    best = min(range(len(shown)), key=lambda place: cost(shown[place], result), default=0)

    # The headline has the settings that all runs share, and a few values of each that varies.
    first = groups[0][0].directory
    settings = written_settings(first)
    for name in swept:
        given = [*dict.fromkeys(run["settings"].get(name, "–") for run in runs)]
        settings[name] = ", ".join(given[:4]) + ", …" * (len(given) > 4)
    data = {
        "folder": visible(sweep),
        "settings": swept,
        "runs": runs,
        "rows": lines,
        "best": best,
        "columns": COLUMNS,
    }
    return fill_page("runs.html", headline(settings, read_metrics(first / RECORD)), data)


def markdown(jobs: list[Job]) -> str:
    """Return the leaderboard as a table of Markdown, aligned as plain text."""
    swept = swept_settings(jobs)
    result = result_of(jobs)
    measured = [column for column in COLUMNS if not column.page_only and values(jobs, column.field)]
    measured.sort(key=lambda column: column.field.startswith("val_"))  # the basis of the result stands beside it
    over_seeds = ", mean ± sd" if "seed" in swept else ""
    table = [[*swept, *(column.title for column in measured), result.replace("_", " ") + over_seeds]]
    groups = rank(jobs)
    for group in groups:
        cells = []
        for name in swept:
            given = dict.fromkeys(job.settings.get(name, "–") for job in group)
            cells.append(", ".join(given) if len(given) < 7 else f"{len(given)} of them")
        for column in measured:
            figure = mean(group, column.field)
            cells.append("–" if figure is None else FORMATS[column.format](figure))
        table.append([*cells, outcome(group, result)])
    lines = markdown_lines(table)

    # Warn if the results are of different seeds or texts.
    finished = [group for group in groups if group[0].status == "finished"]
    seeds = {frozenset(job.settings.get("seed") for job in group) for group in finished}
    if over_seeds and len(seeds) > 1:
        lines += ["", "Some rows are means over other seeds than the rest: compare only those of the same."]
    texts = [name for name in swept if name.startswith("data") and name != "data.cache_dir"]
    if texts:
        names = ", ".join(map(literal_markdown, texts))
        lines += ["", f"The rows were scored on different texts ({names}): compare only those of the same."]
    elif len({job.summary.scored for group in finished for job in group}) > 1:
        lines += ["", "The rows were scored on different parts of the validation text: set eval_tokens."]
    return "\n".join(lines) + "\n"


def outcome(group: Group, result: str) -> str:
    """Return the last cell of a row: its result with the deviation over seeds.

    A group that failed has its reason instead.
    """
    status = group[0].status
    summary = group[0].summary
    if status == "failed":
        return f"failed: {summary.reason or 'no reason was written'}"
    reached = mean(group, result)
    text = "–" if reached is None else f"{reached:.4f}"
    if status != "finished":
        return f"{text} ({status}, step {summary.step or 0})"
    over_seeds = deviation(group, result)
    return text if over_seeds is None else f"{text} ± {over_seeds:.4f}"


def literal_markdown(text: str) -> str:
    """Return a text for a cell of a table, in one line.

    It is quoted as code if Markdown would read anything in it; ` and | are replaced.
    """
    text = visible(" ".join(text.split()))
    return "`" + text.replace("`", "'").replace("|", "¦") + "`" if ACTIVE.search(text) else text


def markdown_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, its head first."""
    table = [[literal_markdown(cell) for cell in line] for line in table]
    # The reason of a failed job is long, so it does not set the width of its column.
    widths = [max(len(c) for c in column if not re.match("`* ?failed: ", c)) for column in zip(*table, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in table]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def comma_separated(jobs: list[Job]) -> str:
    """Return the leaderboard as CSV: a line a job, the best first, with all digits."""
    swept = swept_settings(jobs)
    figures = [field.name for field in fields(Summary) if field.name not in swept]
    lines: list[list[Any]] = [["job", *swept, *figures]]
    for job in chain.from_iterable(rank(jobs)):
        settings = [job.settings.get(name) for name in swept]
        lines.append([job.name, *settings, *(getattr(job.summary, name) for name in figures)])
    return csv_text(lines)


def csv_text(lines: Iterable[Iterable[Any]]) -> str:
    """Return the lines of a CSV file, its head first."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
