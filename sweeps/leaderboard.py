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
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from common.errors import format_value, os_error_reason
from common.files import is_locked, replace_text
from common.text import duration, flat, plural, si, visible
from pages.kit import fill_page
from pages.runs import RECORD, describe_run, headline, longest_curves
from runs.directory import TABLE, in_order, settings_of_result, trained_settings, written_settings
from runs.metrics import read_metrics
from runs.summary import JOB, NUMBERS, JobRecord, Summary, read_job, read_summary
from runs.summary import NAME as SUMMARY
from training.config import TrainConfig

log = logging.getLogger("tinygpt")
PAGE = "report.html"

# {format of a figure: its function}, as in pages/runs.html.
FORMATS = {
    "number": lambda figure: f"{figure:.4f}",
    "grouped": lambda figure: f"{math.floor(figure + 0.5):,}",  # Python rounds 7388.5 to an even number, a browser up
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


class Fact(NamedTuple):
    """What may differ between jobs of the same settings."""

    said: str
    """What is said of rows that differ in it."""
    settings: tuple[str, ...]
    """The settings and groups that it follows from."""

    def asked(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return those of `settings`, by dotted names, that it follows from."""
        return {name: value for name, value in settings.items() if name.partition(".")[0] in self.settings}


VERSIONS = {
    "code_hash": Fact("have different versions of a file of code=", ("code",)),
    "text_hash": Fact("have different versions of the text", ("data", "tokenizer", "init_from")),
    "weights_hash": Fact("begin with different weights of init_from=", ("init_from",)),
    "computed_in": Fact("were computed in different types of numbers", ("precision", "device")),
    "earlier_settings": Fact("are of runs that were resumed with other settings or code", ()),
}
DEFAULTS = flat(asdict(TrainConfig()))
ROUND = re.compile(r"[0-9]{1,3}0{6,30}\.0")  # a large round number
# Signs by which Markdown may turn a text into a link, an image, HTML or another font.
ACTIVE = re.compile(r"[^\w\s.,;:+/=%()±–×'\"<-]|<[A-Za-z/!?]|://|www\.|\b_|_\b")


@dataclass
class Job:
    """One job of a sweep."""

    directory: Path
    name: str
    """The path of its folder below the sweep's."""
    settings: dict[str, str]
    """Its values of the settings that the sweep varies, as in its config.yaml; before it has one, as typed."""
    summary: Summary
    derived: dict[str, str] = field(default_factory=dict)
    """Overrides that follow from other settings, as they were typed: {NAME: "${…}"}."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """All settings in its config.yaml; none if there is no such file."""
    repeats: list[str] = field(default_factory=list)
    """The names of jobs that have the same settings, seed and code, and are left out."""
    edited: dict[str, str] = field(default_factory=dict)
    """Settings in its config.yaml with which it was not trained, as that was edited."""

    @property
    def status(self) -> str:
        return self.summary.status

    @property
    def but_seed(self) -> frozenset[tuple[str, str]]:
        """What jobs of a row have in common."""
        return frozenset((self.settings | self.derived).items()) - {("seed", self.settings.get("seed"))}

    @property
    def identity(self) -> Any:
        """What only a job that repeats this one has in common with it."""
        # config.yaml tells texts from numbers: the prompts 1 and 1.0 are two.
        written = settings_of_result(self.resolved)
        values = {name: value if isinstance(value, str) else number_or_text(value) for name, value in written.items()}
        values = values or {name: number_or_text(value) for name, value in self.settings.items()}
        return frozenset(values.items()), *(getattr(self.summary, name) for name in ("project_hash", *VERSIONS))


Group = list[Job]
"""The jobs of a row of the leaderboard, which differ in nothing but their seed."""


def read_jobs(sweep: Path | str) -> list[Job]:
    """Return the jobs in a folder by number, and the runs below it that are no jobs of a sweep.

    Of finished jobs with the same settings, seed and code, only the first is among them: together they would pass for
    several seeds.
    """
    sweep = Path(sweep)
    # Read the records of the jobs, by folder.
    found = {path.parent: read_job(path.parent) or unreadable(path) for path in sweep.glob(f"*/**/{JOB}")}
    alone = [path.parent for path in sweep.glob(f"*/**/{SUMMARY}") if path.parent not in found]
    edited: dict[Path, dict[str, str]] = {}
    settings = {folder: settings_of(folder, edited) for folder in [*found, *alone]}
    # Beside a single run each is told by the settings in which they differ: no config.yaml has an option that was
    # typed, such as tokenizer=byte.
    if alone:
        settings = {folder: with_one_attention(settings_of_result(own)) for folder, own in settings.items()}
        known = [own for own in settings.values() if own]
        every = dict.fromkeys(name for own in known for name in own)
        differ = [name for name in every if len({shown(own.get(name, "")) for own in known}) > 1]
        for folder, own in settings.items():
            new = JobRecord(sys.maxsize, []) if own else unreadable(folder / "config.yaml")
            found[folder] = told_by(differ, own, found.get(folder, new))

    # Add their settings and summaries. Where its config.yaml has a setting that some job was given, it has that value.
    order = sorted(found, key=lambda folder: (found[folder].number, folder))
    typed = {folder: dict(map(name_and_value, found[folder].overrides)) for folder in order}
    if alone:
        typed = {folder: with_one_attention(own) for folder, own in typed.items()}
    names = settings_of_result(dict.fromkeys(name for each in typed.values() for name in each))
    for group in [name for name in names if name not in DEFAULTS]:
        name_options(group, typed, settings)
    is_going_on = is_locked(sweep / ".lock") is not False  # on a disk without locks nobody knows
    jobs = []
    for folder in order:
        written = {name: shown(value) for name, value in settings[folder].items() if name in names}
        if "attention" in written and "model.attention" in settings[folder]:  # for which it is short
            written["attention"] = shown(settings[folder]["model.attention"])
        values = typed[folder] | written
        job = Job(
            folder,
            folder.relative_to(sweep).as_posix(),
            {name: values[name] for name in names if name in values},
            summary_of(folder, found[folder].reason, is_going_on),
            derived={name: value for name, value in typed[folder].items() if "${" in value and name in names},
            resolved=settings[folder],
            edited=edited.get(folder, {}),
        )
        jobs.append(job)
    return distinct(jobs)


def name_options(group: str, typed: dict[Path, dict[str, str]], settings: dict[Path, dict[str, Any]]) -> None:
    """Give jobs without an option of a group, such as optimizer=muon, that of jobs alike in it.

    One may have been added to the command of a sweep that goes on.
    """

    def own(folder: Path) -> tuple[str, ...]:
        return tuple(shown(value) for name, value in settings[folder].items() if name.startswith(f"{group}."))

    options = {own(folder): given[group] for folder, given in typed.items() if group in given and own(folder)}
    for folder, given in typed.items():
        if group not in given and own(folder) in options:
            given[group] = options[own(folder)]


def settings_of(folder: Path, edited: dict[Path, dict[str, str]]) -> dict[str, Any]:
    """Return the settings of a run by dotted names; none if it has no readable config.yaml.

    Those that came later than the run have their defaults. A finished run has those of its last checkpoint, whatever
    became of its config.yaml: `edited` gets what that has in their place.
    """
    written = written_settings(folder)
    if not written:
        return {}
    summary = read_summary(folder)
    trained = trained_settings(folder) if summary and summary.status == "finished" else {}
    settings = DEFAULTS | (trained or written)
    others = {name: shown(value) for name, value in settings_of_result(written).items()}
    edited[folder] = {name: value for name, value in others.items() if value != shown(settings.get(name))}
    # A resumed run of an earlier version has lost its init_from, which the job's record and weights_hash tell. Where a
    # summary has computed_in, a weights_hash of None says that there was no init_from.
    is_own = summary and summary.computed_in and not summary.weights_hash
    if settings["resume"] and not is_own:
        del settings["init_from"]
    return {name: in_order(name, value) for name, value in settings.items()}


def with_one_attention(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which `attention`, short for model.attention, stands for both."""
    if "model.attention" not in settings:
        return settings
    others = {name: value for name, value in settings.items() if not name.endswith("attention")}
    return {"attention": settings["model.attention"]} | others


def told_by(names: Iterable[str], settings: dict[str, Any], record: JobRecord) -> JobRecord:
    """Return a job's record with these of its settings in place of the typed ones.

    Typed ones that follow from others, as by ${seed}, stay. A job that failed before it had a config.yaml has no
    settings: of it all typed ones stay, but for options.
    """
    own = [f"{name}={format_value(settings[name])}" for name in names if name in settings]
    typed = record.overrides
    kept = [each for each in typed if ("${" in each if settings else name_and_value(each)[0] in DEFAULTS)]
    return replace(record, overrides=[*own, *kept])


def name_and_value(override: str) -> tuple[str, str]:
    """Return the name and the value of an override, without Hydra's quotes."""
    name, _, value = override.lstrip("+~").partition("=")
    if {*"'\"\\"} & {*value}:
        with suppress(HydraException):
            (parsed,) = OverridesParser.create().parse_overrides([f"x={value}"])
            text = parsed.value()
            value = text if isinstance(text, str) else value
    # Write 10000000000.0, as Hydra has it for 1e10, as 1e+10.
    return name, f"{float(value):g}" if ROUND.fullmatch(value) else value


def shown(value: Any) -> str:
    """Return the value of a setting as a person types it, large round numbers short: 1e+10."""
    text = format_value(value)
    return f"{value:g}" if isinstance(value, float) and ROUND.fullmatch(f"{text}.0") else text


def number_or_text(value: Any) -> Any:
    """Return a value, or its text, so that equal numbers are equal: 1e-2 and 0.01."""
    text = format_value(value)
    for kind in (int, float):  # an int first: a seed may have more digits than a float
        with suppress(ValueError):
            return kind(text)
    return text


def distinct(jobs: list[Job]) -> list[Job]:
    """Return the jobs, but of finished ones that repeat each other the first alone."""
    kept: dict[Any, Job] = {}
    for number, job in enumerate(jobs):
        first = kept.setdefault(job.identity if job.status == "finished" else number, job)
        if first is not job:
            first.repeats.append(job.name)
    # A column tells the jobs of other code apart.
    if len({job.summary.project_hash for job in kept.values() if job.status == "finished"}) > 1:
        for job in kept.values():
            job.settings |= {"project_hash": job.summary.project_hash} if job.summary.project_hash else {}
    for name in VERSIONS:
        if has_versions(kept.values(), name):
            for job in kept.values():
                hash_ = getattr(job.summary, name)
                job.settings |= {name: hash_} if hash_ else {}
    for name in [*untyped(kept.values()), *inherited(kept.values())]:
        for job in kept.values():
            job.settings |= {name: shown(job.resolved[name])} if name in job.resolved else {}
    return [*kept.values()]


def untyped(jobs: Iterable[Job]) -> list[str]:
    """Return the settings that no job was given and in which jobs of a row differ.

    Their file has changed between the jobs, or a job was resumed with another value. A parallel launcher chooses the
    device.
    """
    rows = ((job.but_seed, settings_of_result(job.resolved)) for job in jobs if job.status == "finished")
    return [name for name in differing(rows) if name not in ("seed", "device")]


def inherited(jobs: Iterable[Job]) -> list[str]:
    """Return the settings in which the models and tokenizers of several init_from= differ.

    A job without one has the defaults.
    """
    rows = []
    for job in jobs:
        if "init_from" in job.settings:
            others = frozenset(setting for setting in job.but_seed if setting[0] not in ("init_from", *VERSIONS))
            rows.append((others, job.resolved))
    inherits = ("model.", "tokenizer.")
    return [name for name in differing(rows) if name.startswith(inherits) and name != "model.vocab_size"]


def differing(rows: Iterable[tuple[frozenset[tuple[str, str]], dict[str, Any]]]) -> list[str]:
    """Return the settings that have several values under one key."""
    known: dict[frozenset[tuple[str, str]], dict[str, set[str]]] = {}
    for key, settings in rows:
        values = known.setdefault(key, {})
        for name, value in settings.items():
            values.setdefault(name, set()).add(shown(value))
    return [*dict.fromkeys(name for values in known.values() for name, texts in values.items() if len(texts) > 1)]


def has_versions(jobs: Iterable[Job], name: str) -> bool:
    """Return whether jobs of a row, or with the settings that it follows from, differ in a fact."""
    versions: dict[frozenset[tuple[str, str]], set[str | None]] = {}
    for job in jobs:
        if job.status == "finished":
            others = frozenset(setting for setting in job.but_seed if setting[0] not in VERSIONS)
            asked = settings_of_result(VERSIONS[name].asked(job.resolved))
            texts = [(known, shown(value)) for known, value in asked.items()]
            is_known = job.resolved and (asked or not VERSIONS[name].settings)  # a run that went on has no init_from
            for alike in {others, frozenset([("", ""), *texts])} if is_known else {others}:
                versions.setdefault(alike, set()).add(getattr(job.summary, name))
    unknown = {None} if name in ("text_hash", "weights_hash", "computed_in") else set()  # before they were kept
    return any(len(hashes - unknown) > 1 for hashes in versions.values())


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
    if found and summary.project_hash is None:  # before it was kept, the record for the page had the commit
        commits = dict.fromkeys(note["commit"] for note in read_metrics(folder / RECORD) if note.get("commit"))
        summary = replace(summary, project_hash=f"commit {', '.join(commits)}" if commits else None)
    # On a CPU the jobs share a process, whose allocator keeps the memory of earlier jobs.
    if summary.device == "cpu":
        summary = replace(summary, peak_memory_mb=None)
    if reason:
        return replace(summary, status="failed", reason=reason)
    # A job without a step still prepares its text, if the sweep goes on.
    if summary.status != "running" or (summary.step is None and is_going_on):
        return summary
    summary = summary.at_last(read_metrics(folder / "metrics.jsonl"))
    if is_locked(folder / ".lock") is not False:
        return summary
    return replace(summary, status="stopped", reason=f"ended without a word after step {summary.step or 0}")


def swept_settings(jobs: list[Job]) -> list[str]:
    """Return the settings in which the jobs differ, in the order of the command line."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    return [name for name in names if len({job.settings.get(name) for job in jobs}) > 1]


def rank(jobs: list[Job]) -> list[Group]:
    """Return groups of jobs that differ in their seed alone, the best first.

    Finished ones come by their mean result over seeds, then those under way, then failed ones.
    """
    # Only finished jobs are grouped, those with a result apart from those whose result was not finite; any other is a
    # group alone.
    result = result_of(jobs)
    groups: dict[Any, Group] = {}
    for job in jobs:
        has_result = getattr(job.summary, result) is not None
        groups.setdefault((job.but_seed, job.status == "finished" or job.name, has_result), []).append(job)
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
    lost = [path.name for path in sorted(sweep.glob("*")) if path.is_symlink() and not path.exists()]
    if lost:
        names = visible(", ".join(lost))
        log.warning("%s has links that lead to nothing here (%s): cp -rL copies the runs behind links.", sweep, names)
    if not jobs:
        return ""
    table = markdown(jobs)
    page = leaderboard_page(sweep, jobs)
    for name, text in {TABLE: comma_separated(jobs), "leaderboard.md": table, PAGE: page}.items():
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
    for group in groups:
        rows = [read_metrics(job.directory / "metrics.jsonl") for job in group]
        longest = longest_curves(rows)
        for job, own in zip(group, rows, strict=True):
            run = describe_run(job.name, own, job.settings, asdict(job.summary), longest=longest)
            has_page = (job.directory / PAGE).is_file()
            runs.append(run | {"page": f"{job.name}/{PAGE}" if has_page else None})

    # Fill the lines of the table: each is a run, or the means over seeds.
    shown = [group for group in groups if group[0].status != "failed"]
    lines: list[dict[str, Any]] = []
    for group in shown:
        figures = {name: mean(group, name) for name in NUMBERS} if len(group) > 1 else {}
        lines.append(figures | {"runs": [job.name for job in group], "deviation": deviation(group, result)})
    best = min(range(len(shown)), key=lambda place: cost(shown[place], result), default=0)

    # The headline has the settings that all runs share, and a few values of each that varies: numbers in ascending
    # order, others by their best run.
    first = groups[0][0]
    settings = dict(first.resolved)
    for name in swept:
        given = [*dict.fromkeys(run["settings"].get(name, "–") for run in runs)]
        with suppress(ValueError):
            given = sorted(given, key=float)
        settings[name] = ", ".join(given[:4]) + ", …" * (len(given) > 4)
    data = {
        "folder": visible(sweep),
        "settings": swept,
        "runs": runs,
        "rows": lines,
        "best": best,
        "repeated": [name for job in jobs for name in job.repeats],
        "columns": COLUMNS,
    }
    return fill_page("runs.html", headline(settings, read_metrics(first.directory / RECORD)), data)


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

    # Tell of jobs that are left out, and warn if the results are of different seeds, code or texts.
    repeated = [name for job in jobs for name in job.repeats]
    if repeated:
        names = literal_markdown(", ".join(repeated[:5]) + ", …" * (len(repeated) > 5))
        lines += [
            "",
            f"Left out, for the settings and the seed of another job: {plural(len(repeated), 'job')} ({names}).",
        ]
    for job in [job for job in jobs if job.edited][:5]:
        now = ", ".join(f"{name}={value}" for name, value in job.edited.items())
        line = f"config.yaml of {job.name} has {now}, with which it was not trained: the table has its own settings."
        lines += ["", literal_markdown(line)]
    if "project_hash" in swept:
        lines += ["", "The rows were computed by different code (project_hash): compare only those of the same."]
    for name, fact in VERSIONS.items():
        if has_versions(jobs, name):
            lines += ["", f"Some rows {fact.said} ({name}): compare only those of the same."]
    finished = [group for group in groups if group[0].status == "finished"]
    seeds = {frozenset(job.settings.get("seed") for job in group) for group in finished}
    if over_seeds and len(seeds) > 1:
        lines += ["", "Some rows are means over other seeds than the rest: compare only those of the same."]
    texts = settings_of_scored_text([job for group in finished for job in group], swept)
    if texts:
        names = ", ".join(map(literal_markdown, texts))
        lines += ["", f"The rows were scored on different texts ({names}): compare only those of the same."]
    scored = {job.summary.scored: job.summary.val_tokens for group in finished for job in group}
    scored.pop(None, None)  # no loss was finite
    if len(scored) > 1 and not texts:
        remedy = remedy_for_parts(scored.values())
        lines += ["", f"The rows were scored on different parts of the validation text: {remedy}."]
    learned = max((job.summary.learned or 0 for group in finished for job in group), default=0)
    if learned:
        lines += ["", learned_before(learned)]
    return "\n".join(lines) + "\n"


def learned_before(share: float) -> str:
    """Return the note on figures of weights that have learned such a share of what is held out."""
    had = f"Weights of some runs had learned up to {share:.0%} of what is held out"
    return f"{had}, in runs before: data.val_path=, or for data=nanogpt another val.bin, holds out another text."


def remedy_for_parts(targets: Iterable[float | None]) -> str:
    """Return how runs that scored so many targets of different parts are scored on one."""
    numbers = {number for number in targets if number}
    if len(numbers) > 1:
        return f"eval_tokens={min(numbers):.0f} scores as many targets in each"
    return "eval_tokens=1e9 scores all of it"  # as many tokens of another tokenizer are another part


def settings_of_scored_text(jobs: list[Job], swept: list[str]) -> list[str]:
    """Return those of the swept settings by which jobs were scored on different texts."""
    hashes = {job.summary.text_hash for job in jobs}
    if len(hashes) == 1 and None not in hashes:  # copies of one; those of a task have none
        return []
    read = ("data.val_path", "data.separator", "data.text_field", "data.val_fraction")
    validations = {tuple(job.resolved.get(name) for name in read) for job in jobs}
    # All of one data.val_path is scored, whatever was learned, unless some of that is held out beside it.
    if len(validations) == 1 and all(path and not fraction for path, *_, fraction in validations):
        return []
    return [name for name in swept if name.startswith("data") and name not in ("data.cache_dir", "data.document_mask")]


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
        # A setting of null is an empty field, which programs read as a missing value.
        settings = [None if (value := job.settings.get(name)) == "null" else value for name in swept]
        lines.append([job.name, *settings, *(getattr(job.summary, name) for name in figures)])
    return csv_text(lines)


def csv_text(lines: Iterable[Iterable[Any]]) -> str:
    """Return the lines of a CSV file, its head first."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
