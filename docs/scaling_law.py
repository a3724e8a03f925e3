"""Fit and draw a scaling law:  python docs/scaling_law.py SWEEP [PICTURE.png]

SWEEP is the folder of  python train.py -m +experiment=scaling  (or any sweep over max_flops and one size
setting). Each size has the learning rate that was best for it on average over the seeds. For every compute budget, a
parabola of loss against log(parameters) gives the best size; a line through the best sizes in log-log space is the
power law (Hoffmann et al. 2022, approach 2), for parameters with embeddings and without. The interval of an exponent
is two standard errors by the jackknife (Quenouille 1956) each way: the law is fitted again without each of the runs.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter


@dataclass
class Budget:
    """The runs of one compute budget: sizes, losses and the parabola through them."""

    flops: float
    parameters: np.ndarray
    bpb: np.ndarray

    def __post_init__(self) -> None:
        self.curve = np.polynomial.Polynomial.fit(np.log10(self.parameters), self.bpb, 2)
        bend = self.curve.convert().coef
        self.best_size = 10 ** (-bend[1] / (2 * bend[2])) if bend[2] > 0 else float("nan")
        inside = self.parameters.min() <= self.best_size <= self.parameters.max()
        self.best_size = self.best_size if inside else float("nan")
        self.best_bpb = self.curve(np.log10(self.best_size))


def read_budgets(sweep: Path, column: str) -> list[Budget]:
    """Return a sweep's finished runs by budget and size, `column`; of a size its best rate, seeds averaged."""
    table = sweep / "leaderboard.csv"
    if not table.is_file():
        sys.exit(f"error: {table} does not exist: give the folder of a sweep of +experiment=scaling.")
    runs: dict[float, dict[float, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with table.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["status"] == "finished" and row.get("max_flops") and row.get(column):
                rates = runs[float(row["max_flops"])][float(row[column])]
                rates[row.get("optimizer.lr", "")].append(float(row["val_bpb"]))
    budgets = []
    for flops, sizes in sorted(runs.items()):
        if len(sizes) >= 3:
            bpb = [min(map(np.mean, sizes[n].values())) for n in sorted(sizes)]
            budgets.append(Budget(flops, np.array(sorted(sizes)), np.array(bpb)))
    return budgets


def law_of(budgets: list[Budget]) -> tuple[float, float] | None:
    return power_law(np.array([b.flops for b in budgets]), np.array([b.best_size for b in budgets]))


def interval(budgets: list[Budget], exponent: float) -> str:
    """Return where the exponent lies, give or take two standard errors of the jackknife over runs."""
    found = []
    for number, budget in enumerate(budgets):
        for left_out in range(len(budget.bpb)):
            if len(budget.bpb) > 3:
                rest = Budget(budget.flops, np.delete(budget.parameters, left_out), np.delete(budget.bpb, left_out))
                if law := law_of([*budgets[:number], rest, *budgets[number + 1 :]]):
                    found.append(law[1])
    if len(found) < 2:
        return "; no interval: each budget needs four sizes"
    error = np.sqrt((len(found) - 1) * np.var(found))
    return f", exponent {exponent - 2 * error:.2f} to {exponent + 2 * error:.2f}"


def power_law(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Fit y = a · x^b to the finite points by least squares in logarithms; None for fewer than two points."""
    finite = np.isfinite(y)
    if finite.sum() < 2:
        return None
    b, a = np.polyfit(np.log(x[finite]), np.log(y[finite]), 1)
    return float(np.exp(a)), float(b)


def draw(budgets: list[Budget], law: tuple[float, float] | None, picture: Path) -> None:
    """Plot losses against sizes, and beside that the law if there is one."""
    figure = Figure(figsize=(10 if law else 5, 4.2), layout="constrained")
    panels = figure.subplots(1, 2 if law else 1, squeeze=False)[0]
    draw_sizes(budgets, panels[0])
    if law:
        draw_law(budgets, law, panels[1])
    for axes, place in zip(panels, ("upper right", "upper left"), strict=False):
        axes.grid(alpha=0.3)
        axes.legend(loc=place)
    figure.savefig(picture, dpi=110)


def draw_sizes(budgets: list[Budget], sizes: Axes) -> None:
    for budget in budgets:
        line = sizes.plot(budget.parameters, budget.bpb, "o", label=f"{budget.flops:.0e} FLOP")[0]
        along = np.geomspace(budget.parameters.min(), budget.parameters.max())
        sizes.plot(along, budget.curve(np.log10(along)), color=line.get_color(), alpha=0.6)
        sizes.plot(budget.best_size, budget.best_bpb, "*", color=line.get_color(), markersize=14)
    sizes.set(
        xscale="log", xlabel="parameters", ylabel="validation loss (bits per byte)", title="One budget, many sizes"
    )
    sizes.set_xticks(sorted({n for budget in budgets for n in budget.parameters}))
    sizes.set_xticks([], minor=True)
    sizes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))


def draw_law(budgets: list[Budget], law: tuple[float, float], best: Axes) -> None:
    for budget in budgets:
        best.plot(budget.flops, budget.best_size, "*", markersize=14)  # in the colours of draw_sizes
    flops = np.array([budget.flops for budget in budgets])
    best.plot(flops, law[0] * flops ** law[1], color="grey", label=f"N = {law[0]:.2g} · C^{law[1]:.2f}")
    best.set(title="The best size", xscale="log", yscale="log", xlabel="training FLOP C", ylabel="parameters N")
    best.yaxis.set_minor_formatter(EngFormatter(places=0, sep=""))


def report(budgets: list[Budget], what: str) -> tuple[float, float] | None:
    """Print the best sizes and the law through them, which is returned."""
    print(f"| training FLOP | best {what} | bits per byte there |\n|---|---|---|")
    for budget in budgets:
        size = "outside the sizes tried" if np.isnan(budget.best_size) else f"{budget.best_size:,.0f}"
        print(f"| {budget.flops:.0e} | {size} | {'–' if np.isnan(budget.best_size) else f'{budget.best_bpb:.3f}'} |")
    if law := law_of(budgets):
        print(f"\nbest {what} N = {law[0]:.3g} · C^{law[1]:.2f}{interval(budgets, law[1])}\n")
    else:
        print("\nno law: fewer than two budgets have their best size within the sizes tried: add sizes\n")
    return law


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sweep = Path(sys.argv[1])
    picture = Path(sys.argv[2]) if len(sys.argv) == 3 else sweep / "scaling_law.png"
    budgets = read_budgets(sweep, "parameters")
    if len(budgets) < 2:
        sys.exit(f"error: {sweep} has fewer than two values of max_flops with three sizes each: sweep both.")
    law = report(budgets, "parameters")
    if inside := read_budgets(sweep, "parameters_in_blocks"):
        report(inside, "parameters without embeddings")
    draw(budgets, law, picture)
    print(f"drawn in {picture}")


if __name__ == "__main__":
    main()
