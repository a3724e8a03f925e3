"""Compare a sweep's variants with the first, by seed:  python docs/compare.py FOLDER

python train.py -m +experiment=attention  makes such a FOLDER, which may be unfinished, or have its leaderboard.csv
alone. This prints the table, and writes comparison.md and comparison.csv there. docs/which_attention.md explains the
columns.
"""

import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.errors import SettingsError, at_least, positive
from common.files import replace_text
from common.mistakes import mistakes_explained
from common.text import plural, visible
from docs.command import arguments_asked, existing
from docs.estimates import Estimate, holm, t_quantile
from docs.law import FAILED, Law, at_best_rate
from docs.recorded import recorded_jobs
from sweeps.leaderboard import COLUMNS, FORMATS, Job, csv_text, markdown_lines, swept_settings, values

SIZE = "model.n_embd"
RATE = "optimizer.lr"
END = "(end)"  # beside a best rate at an end of those that were tried
SPEED = "× tokens/s"
SPEED_ERROR = "± × tokens/s"
MATCHINGS = ("tokens", "FLOPs", "seconds")
DECIDED = 0.05  # a difference counts if its p, by Holm over its column, is below
LENGTHS = 5  # lengths of the baseline that its law needs: three parameters, and two more for their error
ROUNDS = 25  # rounds of docs/measured.py, behind a speed and its error
SHOWN = ("decode_tokens_per_s", "cache_bytes_per_token")  # columns of the leaderboard


@dataclass(frozen=True)
class Pick:
    """A seed's result at the learning rate that was best for the other seeds."""

    job: Job
    """A finished job of the seed, for the figures that do not depend on the rate."""
    bpb: float
    rate: float
    at_end: bool
    """Whether the best of several rates was the lowest or highest one tried."""


Picks = dict[str, Pick]
"""Picks by seed."""


def chosen(runs: dict[str, dict[str, Job]]) -> Picks:
    """Return a result for each seed from jobs by rate and seed: no seed chooses its own rate.

    A seed counts if it has a job at every rate. A failed run is worse than any other, and is never the result.
    """
    # The losses by rate and seed.
    rates = sorted(runs, key=number_of)
    seeds = sorted(set.intersection(*map(set, runs.values())))
    table = [[loss_of(runs[rate][seed]) for seed in seeds] for rate in rates]
    picks = {}
    for place, seed in enumerate(seeds):
        bpb, rate, is_inside = at_best_rate([*map(number_of, rates)], table, place)
        # Figures such as tokens do not depend on the rate, so any finished job of the seed has them.
        if bpb < FAILED:
            job = next(runs[each][seed] for each in rates if runs[each][seed].status == "finished")
            picks[seed] = Pick(job, bpb, rate, not is_inside and len(rates) > 1)
    return picks


def loss_of(job: Job) -> float:
    return FAILED if job.status == "failed" else job.summary.val_bpb or FAILED


def figure_of(picks: Picks, name: str) -> float:
    """Return a figure that all jobs of these picks share.

    Raises SettingsError if the first job's summary lacks it.
    """
    job = next(iter(picks.values())).job
    figure = getattr(job.summary, name)
    if not figure:
        problem = f"the summary of job {job.name} has no {name}"
        raise SettingsError(problem, "train that job again, or remove its folder")
    return figure


def basis(pick: Pick) -> tuple[float | None, float | None]:
    """Return the number of tokens that a run was trained on, and the size of the text that it was scored on."""
    return pick.job.summary.tokens, pick.job.summary.scored


def flops_per_token(picks: Picks) -> float:
    return figure_of(picks, "flops") / figure_of(picks, "tokens")


def number_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


@dataclass
class VariantResult:
    """A variant beside the baseline at one size."""

    variant: str
    size: str
    is_complete: bool
    """Whether all seeds have a pair."""
    differences: dict[str, Estimate]
    """The variant's bits per byte less the baseline's, by MATCHINGS: at equal tokens, …"""
    cells: dict[str, str]
    """The other cells of the table, by column."""
    holm: dict[str, float] = field(default_factory=dict)
    """The p of the differences, by Holm over all rows."""


class Comparison:
    """The results in a sweep's folder, by size.

    of_losses: whether the losses are compared, which needs two seeds or more, and their number fixed beforehand.
    Raises SettingsError for a folder that lacks runs of the baseline.
    """

    def __init__(self, folder: Path, *, of_losses: bool = True) -> None:
        if of_losses and (folder / "decide.json").exists():
            problem = f"{folder} is of hydra/sweeper=decide, and a t-test after every pair is often wrong"
            raise SettingsError(problem, "read its decide.md")
        jobs = recorded_jobs(folder)
        if not jobs:
            problem = f"{folder} holds no sweep (no job.json in its folders)"
            remedy = "give the folder that -m made"
            if (folder / "leaderboard.csv").is_file():
                problem = f"{folder / 'leaderboard.csv'} is no table that a sweep has written"
                remedy = "give it as that wrote it; a spreadsheet may have put semicolons or decimal commas into it"
            raise SettingsError(problem, remedy)
        names = variants(jobs)
        self.baseline = names[0]
        steps = jobs[0].settings.get("max_steps", "")

        # Sort the jobs by size, variant and length, then by rate and seed. All seeds count, those of failed jobs too.
        runs: Any = defaultdict(lambda: defaultdict(dict))
        lengths: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.seeds: dict[str, set[str]] = defaultdict(set)
        self.picks: dict[tuple[str, str], Picks] = defaultdict(dict)
        for name, job in zip(names, jobs, strict=True):
            size, length, rate, seed = (job.settings.get(each, "") for each in (SIZE, "max_steps", RATE, "seed"))
            lengths[size, name].add(length)
            if length == steps:
                self.seeds[size].add(seed)
                self.picks[size, name] = {}  # until a job has finished
            if job.status == "failed" or (job.status == "finished" and job.summary.val_bpb):
                runs[size, name, length][rate][seed] = job

        # Pick each seed's result at the best rate, for the baseline at every length.
        self.sizes = sorted({size for size, *_ in runs}, key=number_of)
        self.lengths: dict[str, list[Picks]] = defaultdict(list)
        for (size, name, length), by_rate in runs.items():
            picks = chosen(by_rate)
            if length == steps:
                self.picks[size, name] = picks
            if name == self.baseline and picks:
                self.lengths[size].append(picks)
        if not self.sizes:
            problem = f"{folder} has no finished run with bits per byte"
            raise SettingsError(problem, "let one finish; docs/recall.py tabulates runs of data=recall")
        fewest = 2 if of_losses else 1
        for size in self.sizes:
            count = len(self.picks[size, self.baseline])
            if count < fewest:
                problem = f"{folder}: the baseline, {self.baseline}, is finished for {count} seeds{at(size)}"
                raise SettingsError(problem, f"let it finish {'two' if of_losses else 'one'} or more")
        self.measured = read_measured(folder / "measured.csv")
        counts = sorted({len(seeds) for seeds in self.seeds.values()})
        self.notes = [f"Seeds of a variant: {', '.join(map(str, counts))}."]
        self.left_out = []
        for (size, name), other in lengths.items():
            if steps not in other:
                trained = " and ".join(each or "null" for each in sorted(other, key=number_of))
                problem = f"trained with max_steps={trained} alone, and the baseline with {steps or 'null'}"
                self.left_out.append(f"Left out: {name}{at(size)}, {problem}.")
        self.notes += self.left_out
        if len({tokenizer(job) for job in jobs}) > 1:
            self.notes.append("The tokenizers differ: runs of equal tokens have learned unequal amounts of text.")
        self.laws = {size: self.law(size) for size in self.sizes}

    def law(self, size: str) -> Law | None:
        """Return the law of the baseline's losses; None for too few lengths.

        It is fitted to the means over the seeds that have all lengths.
        """
        # The points of the curve: tokens, and the mean bits per byte.
        lengths = self.lengths[size]
        seeds = set.intersection(*map(set, lengths))
        points = {figure_of(p, "tokens"): statistics.fmean(p[seed].bpb for seed in seeds) for p in lengths if seeds}
        if len(points) < LENGTHS:
            problem = f"The baseline{at(size)} is finished at {plural(len(points), 'length')} with the same seeds"
            self.notes.append(f"{problem}; its law, for equal FLOPs and seconds, needs {LENGTHS}.")
            return None

        # Fit it in multiples of the length of the comparison, and describe it in a note.
        own = figure_of(self.picks[size, self.baseline], "tokens")
        law = Law.fit([length / own for length in points], [*points.values()])
        half = t_quantile(DECIDED, law.freedom) * law.error(lambda law: law.power)
        text = f"{law.floor:.3f} + {law.scale:.3f} · times^-{law.power:.3f} (± {half:.3f}, 95% by t)"
        rest = ", ".join(f"{rest:+.4f} at {times:.2g}" for times, rest in zip(law.times, law.residuals, strict=True))
        self.notes.append(f"The baseline{at(size)}, trained `times` as long: bits per byte = {text}; residuals {rest}.")
        return law

    def rows(self) -> list[VariantResult]:
        """Return the variants at every size, sorted by their lead at the largest."""
        known = [row for each in self.picks if (row := self.row(*each))]
        # Adjust each column's p for the number of variants and sizes.
        for name in MATCHINGS:
            tested = [row for row in known if name in row.differences and row.variant != self.baseline]
            adjusted = holm([row.differences[name].p for row in tested])
            for row, p in zip(tested, adjusted, strict=True):
                row.holm[name] = p
        largest = self.sizes[-1]
        ahead = {row.variant: row.differences["tokens"].mean for row in known if row.size == largest}
        return sorted(known, key=lambda row: (ahead.get(row.variant, 0), row.variant, self.sizes.index(row.size)))

    def row(self, size: str, variant: str) -> VariantResult | None:
        """Compare a variant with the baseline; None with fewer than two seeds that both have."""
        picks = self.picks[size, variant]
        base = self.picks[size, self.baseline]
        seeds = [seed for seed in base if seed in picks]
        # A variant without its worst seeds looks better, so it cannot win.
        is_complete = len(seeds) == len(self.seeds[size])
        if not is_complete:
            left = f"{len(seeds)} of {len(self.seeds[size])} seeds have a pair of finished runs"
            self.notes.append(f"Failed or not finished: {variant}{at(size)}; {left}. It neither wins nor loses.")
        if len(seeds) < 2:
            return None

        # Other lengths, or losses on other parts of the text, do not compare.
        if any(basis(picks[seed]) != basis(base[seed]) for seed in seeds):
            unequal = (
                "trained on other numbers of tokens than the baseline, or scored on other text (set eval_tokens=N)"
            )
            self.notes.append(f"Left out: {variant}{at(size)}, {unequal}.")
            return None

        # Add the difference at equal tokens, and the figures that follow from it.
        used = [picks[seed] for seed in seeds]
        plain = Estimate.of([picks[seed].bpb - base[seed].bpb for seed in seeds])
        mean = statistics.fmean(pick.bpb for pick in used)
        row = VariantResult(variant, size, is_complete, {"tokens": plain}, {"val bpb": f"{mean:.4f}"})
        self.add_costs(row, plain, flops_per_token(picks) / flops_per_token(base))

        # Add the learning rates, if they are swept, and measured figures.
        rates = sorted(pick.rate for pick in used)
        if rates[-1]:
            ends = f" {END}" if any(pick.at_end for pick in used) else ""
            shown = dict.fromkeys((f"{rates[0]:.3g}", f"{rates[-1]:.3g}"))
            row.cells[RATE] = " to ".join(shown) + ends
        for column in COLUMNS:
            figures = values([pick.job for pick in used], column.field)
            if figures and column.field in SHOWN:
                row.cells[column.title] = FORMATS[column.format](statistics.median(figures))
        return row

    def add_costs(self, row: VariantResult, plain: Estimate, times: float) -> None:
        """Add the cells that follow from the law and from measured.csv.

        times: the variant's FLOPs a token, divided by the baseline's.
        """
        # A copy, because the columns with a meaning are taken out; the others are shown as they are.
        law = self.laws[row.size]
        measured = dict(self.measured.get((row.variant, row.size), {}))
        speed, error = (number_of(measured.pop(name, "")) for name in (SPEED, SPEED_ERROR))
        if law:
            row.differences["FLOPs"] = law.at_equal_cost(plain, times)
            compute, seeds, own = law.effective_compute(plain, times)
            beyond = "" if min(law.times) <= compute * times <= max(law.times) else " extrapolated"
            row.cells["effective compute ± seeds ± law"] = f"{compute:.2f} ± {seeds:.2f} ± {own:.2f}{beyond}"
        if speed:
            row.cells[SPEED] = f"{speed:.2f} ± {error:.2f}"
        if law and speed:
            # In equal time the baseline trains 1 / speed as long. slope is the derivative of its loss by the speed.
            slope = law.scale * law.power * speed ** (law.power - 1)
            row.differences["seconds"] = law.at_equal_cost(plain, 1 / speed, (slope * error, ROUNDS - 1))
            row.cells["effective time"] = f"{compute * times * speed:.2f}"
        row.cells |= {name: text for name, text in measured.items() if name and text}

    def table(self) -> list[list[str]]:
        """Return the table's cells, its head first."""
        lines = []
        rows = self.rows()
        for row in rows:
            line = {"variant": row.variant, SIZE: row.size, "val bpb": row.cells["val bpb"]}
            for name, p in row.holm.items():
                difference = row.differences[name]
                p_text = "<0.001" if p < 0.001 else f"{p:.3f}"
                line[f"± at equal {name} (p by Holm)"] = f"{difference.mean:+.4f} ± {difference.error:.4f} ({p_text})"
            same = [other for other in rows if other.variant == row.variant]
            last = "the baseline" if row.variant == self.baseline else verdict(same, len(self.sizes))
            lines.append(line | row.cells | {"at all sizes": last})
        # Order the columns as in the longest line: it lacks only those that measured.csv has for some variants.
        names = dict.fromkeys(name for line in sorted(lines, key=len, reverse=True) for name in line)
        return [[*names], *([line.get(name, "–") for name in names] for line in lines)]


def at(size: str) -> str:
    return f" at {SIZE}={size}" if size else ""


def tokenizer(job: Job) -> tuple[str, str]:
    """Return the tokenizer of a job and, if it is trained, the number of its ids, as far as the table has them."""
    name = job.settings.get("tokenizer.name") or job.settings.get("tokenizer") or "bpe"
    return name, job.settings.get("tokenizer.vocab_size", "") if name == "bpe" else ""


def variants(jobs: list[Job]) -> list[str]:
    """Return each job's variant: its attention, and the settings in which it differs from the first job.

    Seed, learning rate, size and length are left out.
    """
    given = sorted(set(swept_settings(jobs)) - {"seed", RATE, SIZE, "max_steps"})
    named = []
    first: dict[str, str] = {}
    for job in jobs:
        own = {name: job.settings.get(name, "null") for name in given}  # a table has an empty field for null
        first = first or own
        differing = {name: value for name, value in own.items() if value != first[name]}
        if "attention" in job.settings:
            differing["attention"] = job.settings["attention"]
        named.append(" ".join(f"{name}={differing[name]}" for name in given if name in differing))
    return [name.removeprefix("attention=") or "baseline" for name in named]


def refuse_several(folder: Path, jobs: list[Job], *names: str) -> None:
    """Raise SettingsError for runs that differ in one of these settings, which a script would take for seeds."""
    several = [name for name in names if len({job.resolved.get(name) for job in jobs}) > 1]
    if several:
        problem = f"{folder} has runs of several values of {' and '.join(several)}"
        raise SettingsError(problem, "give a folder whose runs have one")


def read_measured(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Return further columns from a CSV file, if it exists, by variant and model.n_embd."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file, restkey="", restval=""))
    if rows and not {"variant", SIZE} <= rows[0].keys():
        raise SettingsError(f"{path} has no columns variant and {SIZE}", "add them, or remove the file")
    for row in rows:
        if SPEED in row:
            whose = f"{path}: {row['variant']}'s"
            positive(f"{whose} {SPEED}", number_of(row[SPEED]))
            at_least(f"{whose} {SPEED_ERROR}", number_of(row.get(SPEED_ERROR, "nan")), 0)
    return {(row.pop("variant"), row.pop(SIZE)): row for row in rows}


def verdict(rows: Sequence[VariantResult], sizes: int) -> str:
    """Return the matchings at which a variant wins or loses against the baseline at every size."""

    if not all(row.is_complete for row in rows):
        return "undecided"

    def holds(name: str, sign: int) -> bool:
        known = [(row.holm[name], row.differences[name].mean * sign) for row in rows if name in row.holm]
        return len(known) == sizes and all(p < DECIDED and ahead > 0 for p, ahead in known)

    found = {word: [name for name in MATCHINGS if holds(name, sign)] for word, sign in (("wins", -1), ("loses", 1))}
    return "; ".join(f"{word} at equal {', '.join(names)}" for word, names in found.items() if names) or "undecided"


def compare(folder: Path) -> str:
    """Write comparison.md and comparison.csv into a sweep's folder; return the text to print."""
    comparison = Comparison(folder)
    table = comparison.table()
    notes = comparison.notes
    if any(END in cell for row in table for cell in row):
        notes = [*notes, f"{END}: the rates tried end there, and the best may lie beyond."]
    text = "\n".join([*markdown_lines(table), *(f"\n{note}" for note in notes)]) + "\n"
    replace_text(folder / "comparison.md", text)
    replace_text(folder / "comparison.csv", csv_text(table))
    return f"{text}\ntable     {folder / 'comparison.md'}"


if __name__ == "__main__":
    with mistakes_explained():
        (folder,) = arguments_asked(__doc__, "FOLDER")
        print(visible(compare(existing(folder))))
