"""Compare the variants of a sweep with its first one, paired by seed:  python -m sweeps.compare FOLDER

FOLDER is what  python train.py -m +experiment=attention  makes, finished or not. Prints the table, and writes it beside
its leaderboard as comparison.md, comparison.csv and front.png. docs/which_attention.md says how to read it.
"""

import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.files import replace_text, replacing
from errors import SettingsError
from runs.formatting import visible
from runs.summary import is_number
from sweeps.leaderboard import MEASURED, Job, markdown_lines, read_jobs, swept_settings, values

SIZE, RATE, SPEED = "model.n_embd", "optimizer.lr", "× tokens/s"
MATCHINGS = ("tokens", "FLOPs", "seconds", "parameters")
DECIDED = 0.05  # the p below which a difference at one size counts
CACHE = "cache B/token"
SHOWN = ("decode tokens/s", CACHE)  # of the leaderboard's columns


@dataclass(frozen=True)
class Paired:
    """A mean of paired differences, its standard error and the p of a two-sided t-test that it is zero."""

    mean: float
    error: float
    p: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Paired":
        n, mean = len(differences), statistics.fmean(differences)
        error = statistics.stdev(differences) / math.sqrt(n)
        return cls(mean, error, p_value(mean / error, n - 1) if error else float(mean == 0))


def p_value(t: float, freedom: int) -> float:
    """Return the chance of a Student t at least as far from 0 (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle, odd = math.atan(abs(t) / math.sqrt(freedom)), freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(odd, freedom, 2):
        total += term
        term *= (k + 1) / (k + 2) * math.cos(angle) ** 2
    within = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + within) if odd else within))


@dataclass(frozen=True)
class Law:
    """Loss of the baseline trained `times` as long: floor + scale · times^-power (Hestness et al. 2017)."""

    floor: float
    scale: float
    power: float

    @classmethod
    def fit(cls, times: Sequence[float], losses: Sequence[float]) -> "Law":
        """Fit by least squares of the logarithm, for the floor on a grid that leaves the least squares of the loss."""

        def law(floor: float) -> Law:
            slope, start = np.polyfit(np.log(times), np.log(np.array(losses) - floor), 1)
            return cls(floor, math.exp(start), -float(slope))

        def squares(law: Law) -> float:
            return sum((law.loss(x) - y) ** 2 for x, y in zip(times, losses, strict=True))

        return min((law(min(losses) * share) for share in np.linspace(0, 0.99, 199)), key=squares)

    def loss(self, times: float) -> float:
        return self.floor + self.scale * times**-self.power

    def times(self, loss: float) -> float:
        """Return how many times as long the baseline would train to this loss; infinite below the floor."""
        return ((loss - self.floor) / self.scale) ** (-1 / self.power) if loss > self.floor else math.inf


Runs = dict[str, dict[str, Job]]
"""By learning rate and seed, the jobs of one variant, size and length."""


@dataclass
class Row:
    """A variant beside the baseline at one size."""

    variant: str
    size: str
    bpb: float
    rates: list[str]
    differences: dict[str, Paired]
    """Bits per byte more than the baseline's, by what both had the same of."""
    compute: tuple[float, float, float]
    """Times its FLOPs that the baseline needs for its loss: of the mean, one standard error worse and better."""
    speed: float
    """Tokens a second, times the baseline's."""
    flops: float
    """FLOPs a token, times the baseline's."""
    measured: dict[str, float]


class Comparison:
    """What a sweep's folder says, by size; SettingsError for a folder that lacks what is needed."""

    def __init__(self, folder: Path) -> None:
        if not (jobs := read_jobs(folder)):
            raise SettingsError(f"{folder} holds no sweep (no job.json in its folders): give the folder that -m made.")
        self.runs: dict[str, dict[tuple[str, str], Runs]] = defaultdict(dict)
        keys = [(name, job.settings.get("max_steps", "")) for name, job in zip(variants(jobs), jobs, strict=True)]
        for key, job in zip(keys, jobs, strict=True):
            if job.status == "failed" or (job.status == "finished" and is_number(job.summary["val_bpb"])):
                runs = self.runs[job.settings.get(SIZE, "")].setdefault(key, defaultdict(dict))
                runs[job.settings.get(RATE, "")][job.settings.get("seed", "")] = job
        self.baseline = keys[0]
        self.sizes = sorted(self.runs, key=lambda size: float(size or 0))
        self.measured = read_measured(folder / "measured.csv")
        self.laws: dict[str, Law] = {}
        self.tested: dict[str, tuple[float, float]] = {}  # by size, the shortest and the longest, times its length
        self.unfinished: list[str] = []
        self.base = {size: chosen(self.runs[size].get(self.baseline, {})) for size in self.sizes}
        for size, found in self.base.items():
            if (count := len(found)) < 2:
                where = f"{SIZE}={size}: " if size else ""
                problem = f"{where}the baseline, {self.baseline[0]}, is finished for {count} seeds"
                raise SettingsError(f"{folder}: {problem}: let it finish two or more.")

    def rows(self) -> list[Row]:
        """Return the variants at every size, those that save most arithmetic at the largest first."""
        rows = []
        for size in self.sizes:
            self.laws[size] = self.law(size)
            for variant, steps in self.runs[size]:
                if steps == self.baseline[1]:
                    rows += self.row(size, variant)
        ahead = {row.variant: row.compute[0] for row in rows if row.size == self.sizes[-1]}
        return sorted(rows, key=lambda row: (-ahead.get(row.variant, 0), row.variant, self.sizes.index(row.size)))

    def law(self, size: str) -> Law:
        """Fit the baseline's losses at its lengths; SettingsError for fewer than three."""
        baselines = [chosen(runs) for (variant, _), runs in self.runs[size].items() if variant == self.baseline[0]]
        lengths = [jobs for jobs in baselines if jobs]
        seeds = set.intersection(*map(set, lengths))
        points = {}
        for jobs in lengths if seeds else ():
            same = [jobs[seed] for seed in seeds]
            points[same[0].summary["tokens"]] = statistics.fmean(values(same, "val_bpb"))
        if len(points) < 3:
            where = f"at {SIZE}={size} " if size else ""
            raise SettingsError(
                f"the baseline {where}is finished at {len(points)} lengths with the same seeds, and its law needs 3: "
                "let the sweep finish, or add variants with other max_steps."
            )
        own = next(iter(self.base[size].values())).summary["tokens"]
        self.tested[size] = min(points) / own, max(points) / own
        return Law.fit([tokens / own for tokens in points], list(points.values()))

    def row(self, size: str, variant: str) -> list[Row]:
        runs, base, law = self.runs[size][variant, self.baseline[1]], self.base[size], self.laws[size]
        jobs = chosen(runs)
        shared = [seed for seed in base if seed in jobs]
        if len(shared) < len(base):
            self.unfinished.append(f"{variant} at {SIZE}={size} ({len(shared)} of {len(base)} seeds)")
        if len(shared) < 2:
            return []
        compared = [jobs[seed] for seed in shared]
        behind = [jobs[seed].summary["val_bpb"] - base[seed].summary["val_bpb"] for seed in shared]
        mine, its = compared[0].summary, base[shared[0]].summary
        speed = self.speed(size, variant, runs)
        flops = mine["flops"] / mine["tokens"] / (its["flops"] / its["tokens"])
        # The baseline is moved along its law to what the variant took.
        moved = {"tokens": 0.0, "FLOPs": law.loss(flops) - law.loss(1), "seconds": law.loss(1 / speed) - law.loss(1)}
        if mine["parameters_in_blocks"] and its["parameters_in_blocks"] and len(self.sizes) > 1:
            more = math.log(mine["parameters_in_blocks"] / its["parameters_in_blocks"])
            moved["parameters"] = law.loss(1) * (math.exp(self.slope() * more) - 1)
        differences = {name: Paired.of([d - shift for d in behind]) for name, shift in moved.items()}
        plain = differences["tokens"]
        middle, worse, better = (law.times(law.loss(1) + plain.mean + n * plain.error) / flops for n in (0, 1, -1))
        known = {name: values(compared, MEASURED[name][0]) for name in SHOWN}
        measured = {name: statistics.median(figures) for name, figures in known.items() if figures}
        rates = sorted({job.settings.get(RATE, "") for job in jobs.values()})
        bpb = statistics.fmean(values(compared, "val_bpb"))
        return [Row(variant, size, bpb, rates, differences, (middle, worse, better), speed, flops, measured)]

    def slope(self) -> float:
        """Return d ln(loss) / d ln(parameters without embeddings) of the baseline between the smallest and largest."""
        ends = [list(self.base[size].values()) for size in (self.sizes[0], self.sizes[-1])]
        losses = [math.log(statistics.fmean(values(jobs, "val_bpb"))) for jobs in ends]
        numbers = [math.log(jobs[0].summary["parameters_in_blocks"]) for jobs in ends]
        return (losses[1] - losses[0]) / (numbers[1] - numbers[0])

    def speed(self, size: str, variant: str, runs: Runs) -> float:
        """Return the ratio of the speeds, as it was measured in turns or else the median over the pairs of rate and
        seed, which ran one after the other."""
        if measured := self.measured.get((variant, size), {}).get(SPEED):
            return float(measured)
        base = self.runs[size][self.baseline]
        pairs = [(job, base.get(rate, {}).get(seed)) for rate, seeds in runs.items() for seed, job in seeds.items()]
        speeds = [(a.summary["tokens_per_s"], b.summary["tokens_per_s"]) for a, b in pairs if b is not None]
        if not (ratios := [mine / its for mine, its in speeds if mine and its]):
            raise SettingsError(f"{variant} shares no {RATE} and seed with the baseline: give all the same ones.")
        return statistics.median(ratios)


def variants(jobs: list[Job]) -> list[str]:
    """Return each job's variant as it was typed, without seed, learning rate, size and length."""
    given = sorted(set(swept_settings(jobs)) - {"seed", RATE, SIZE, "max_steps"})
    typed = (" ".join(f"{name}={job.settings[name]}" for name in given if name in job.settings) for job in jobs)
    return [name.removeprefix("attention=") or "baseline" for name in typed]


def chosen(runs: Runs) -> dict[str, Job]:
    """Return a job a seed, of the learning rate that was best on average over the other seeds: none chooses its own.

    Seeds count that are there for every rate. A run that failed is worse than any that did not, and is not returned.
    """
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in runs.values()))) if runs else []

    def cost(rate: str, seed: str) -> tuple[int, float]:
        others = [runs[rate][other] for other in seeds if other != seed] or [runs[rate][seed]]
        finished = [job for job in others if job.status == "finished"]
        return len(others) - len(finished), sum(values(finished, "val_bpb"))

    found = {seed: runs[min(runs, key=lambda rate: cost(rate, seed))][seed] for seed in seeds}
    return {seed: job for seed, job in found.items() if job.status == "finished"}


def verdict(rows: Sequence[Row], sizes: int) -> str:
    """Return at which matchings a variant's rows are all ahead, or all behind, of the baseline."""
    found = []
    for word, sign in (("wins", -1), ("loses", 1)):
        names = [
            name
            for name in MATCHINGS
            if len(rows) == sizes
            and all((d := row.differences.get(name)) and d.p < DECIDED and d.mean * sign > 0 for row in rows)
        ]
        found += [f"{word} at equal {', '.join(names)}"] if names else []
    return "; ".join(found) or "undecided"


def table_of(comparison: Comparison, rows: list[Row]) -> list[list[str]]:
    """Return the table's cells, its head first."""
    more = comparison.measured
    several = [name for name in MATCHINGS if any(name in row.differences for row in rows)]
    extra = [name for name in dict.fromkeys(name for columns in more.values() for name in columns) if name != SPEED]
    table = [["variant", SIZE, "val bpb", *(f"± at equal {name} (p)" for name in several)]]
    table[0] += ["effective compute", SPEED, "effective time", RATE, *SHOWN, *extra, "at all sizes"]
    for row in rows:
        plain = row.variant == comparison.baseline[0]
        cells = [row.variant, row.size, f"{row.bpb:.4f}"]
        for name in several:
            d = row.differences.get(name)
            p = "" if d is None else "<0.001" if d.p < 0.001 else f"{d.p:.3f}"
            cells.append("–" if d is None or plain else f"{d.mean:+.4f} ± {d.error:.4f} ({p})")
        middle, worse, better = row.compute
        times = middle * row.flops  # as long
        shortest, longest = comparison.tested[row.size]
        beyond = "" if shortest <= times <= longest else " extrapolated"
        factor = f"{middle:.2f} ({worse:.2f} to {better:.2f})" + beyond
        cells += ["1" if plain else factor, f"{row.speed:.2f}", f"{times * row.speed:.2f}", ", ".join(row.rates)]
        cells += [MEASURED[name][1](row.measured[name]) if name in row.measured else "–" for name in SHOWN]
        cells += [more.get((row.variant, row.size), {}).get(name, "–") for name in extra]
        same = [other for other in rows if other.variant == row.variant]
        table.append([*cells, "the baseline" if plain else verdict(same, len(comparison.sizes))])
    return table


def draw_front(rows: list[Row], size: str, picture: Path) -> None:
    """Plot bits per byte against the cache's bytes a token at one size, and the front of the best."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if row.size == size and CACHE in row.measured]
    points = sorted((row.measured[CACHE], row.bpb, row.variant) for row in shown)
    most, losses = max(cache for cache, _, _ in points), [bpb for _, bpb, _ in points]
    line, lowest = (max(losses) - min(losses)) / 32, math.inf
    for cache, bpb, name in sorted(points, key=lambda point: -point[1]):
        axes.plot(cache, bpb, "o", color="C0")
        if cache < 0.9 * most:
            axes.annotate(name, (cache, bpb), (0, 5), textcoords="offset points", fontsize=8, ha="center")
        else:  # where the whole cache is kept there are many
            lowest = min(bpb, lowest - line)
            how: dict[str, Any] = {"arrowstyle": "-", "color": "grey", "linewidth": 0.5, "relpos": (0, 0.5)}
            axes.annotate(name, (cache, bpb), (cache * 1.03, lowest), fontsize=8, va="center", arrowprops=how)
    front = [p for i, p in enumerate(points) if all(p[1] < other[1] for other in points[:i])]
    axes.step([p[0] for p in front], [p[1] for p in front], where="post", color="grey", alpha=0.6)
    axes.set(xscale="log", xlabel="cache, bytes a token", ylabel="validation loss (bits per byte)")
    axes.set_xlim(0.75 * points[0][0], 1.5 * most)
    for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis("{x:,.0f}")
    axes.set_title(f"{SIZE}={size}")
    figure.savefig(picture, dpi=110, format="png")


def read_measured(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Return the further columns of a CSV file by variant and model.n_embd; none where there is no file."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and not {"variant", SIZE} <= rows[0].keys():
        raise SettingsError(f"{path} has no columns variant and {SIZE}: add them, or remove the file.")
    return {(row.pop("variant"), row.pop(SIZE)): row for row in rows}


def compare(folder: Path) -> str:
    """Write comparison.md, comparison.csv and front.png into a sweep's folder; return what to print."""
    comparison = Comparison(folder)
    rows = comparison.rows()
    table = table_of(comparison, rows)
    lines = markdown_lines(table)
    for size, law in comparison.laws.items():
        text = f"bits per byte = {law.floor:.3f} + {law.scale:.3f} · times^-{law.power:.3f}"
        # Where these lie far apart, seconds are the machine's more than the variant's.
        speeds = [job.summary["tokens_per_s"] for job in comparison.base[size].values()]
        span = f"{min(speeds):,.0f} to {max(speeds):,.0f} tokens/s"
        lines += ["", f"The baseline at {SIZE}={size}: {text}, trained `times` as long; {span}."]
    if comparison.unfinished:
        lines += ["", f"Not finished: {'; '.join(comparison.unfinished)}."]
    text = "\n".join(lines) + "\n"
    replace_text(folder / "comparison.md", text)
    with replacing(folder / "comparison.csv") as file, file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(table)
    text += f"\ntable     {folder / 'comparison.md'}"
    if any(row.size == comparison.sizes[-1] and CACHE in row.measured for row in rows):
        with replacing(folder / "front.png") as file:
            draw_front(rows, comparison.sizes[-1], file)
        text += f"\nfront     {folder / 'front.png'}"
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m sweeps.compare FOLDER    (a folder that -m made under multirun/)")
    try:
        print(visible(compare(Path(sys.argv[1]))))
    except (SettingsError, OSError) as error:
        sys.exit(f"error: {error}")
