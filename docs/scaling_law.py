"""Fit and draw a scaling law:  python docs/scaling_law.py SWEEP [PICTURE.png]

SWEEP is the folder of  python train.py -m +experiment=scaling  (or any sweep over max_flops and one size
setting). Each size has the learning rate that was best for it on average over the seeds. For every compute budget, a
parabola of loss against log(parameters) gives the best size; a line through the best sizes in log-log space is the
power law (Hoffmann et al. 2022, approach 2), for parameters with embeddings and without. The interval of an exponent
is two standard errors by the jackknife (Quenouille 1956) each way: the law is fitted again without each of the sizes.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

Budgets = dict[float, dict[float, float]]  # FLOP: parameters: bits per byte


def read_budgets(sweep: Path, column: str) -> Budgets:
    """Return a sweep's finished runs by budget and size, `column`; of a size its best rate, seeds averaged."""
    table = sweep / "leaderboard.csv"
    if not table.is_file():
        sys.exit(f"error: {table} does not exist: give the folder of a sweep of +experiment=scaling.")
    rates = defaultdict[tuple[float, float, str], list[float]](list)
    with table.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["status"] == "finished" and row.get("max_flops") and row.get(column):
                key = float(row["max_flops"]), float(row[column]), row.get("optimizer.lr", "")
                rates[key].append(float(row["val_bpb"]))
    budgets: Budgets = defaultdict(dict)
    for (flops, size, _), found in sorted(rates.items()):
        budgets[flops][size] = min(budgets[flops].get(size, np.inf), float(np.mean(found)))
    return {flops: sizes for flops, sizes in budgets.items() if len(sizes) >= 3}


def best(sizes: dict[float, float]) -> tuple[float, float]:
    """Return the lowest point of the parabola, parameters and loss; NaN where it is outside of the sizes tried."""
    curve = parabola(sizes)
    _, b, a = curve.convert().coef
    size = 10 ** (-b / (2 * a)) if a > 0 else np.nan
    return (size, curve(np.log10(size))) if min(sizes) <= size <= max(sizes) else (np.nan, np.nan)


def parabola(sizes: dict[float, float]) -> np.polynomial.Polynomial:
    return np.polynomial.Polynomial.fit(np.log10([*sizes]), [*sizes.values()], 2)


def law_of(budgets: Budgets) -> tuple[float, float] | None:
    """Fit N = a · C^b to the best sizes by least squares in logarithms; None where fewer than two are known."""
    found = [(flops, size) for flops, sizes in budgets.items() if np.isfinite(size := best(sizes)[0])]
    if len(found) < 2:
        return None
    b, a = np.polyfit(*np.log(found).T, 1)
    return float(np.exp(a)), float(b)


def interval(budgets: Budgets, exponent: float) -> str:
    """Return where the exponent lies, give or take two standard errors of the jackknife."""
    without = [
        budgets | {flops: {size: loss for size, loss in sizes.items() if size != left_out}}
        for flops, sizes in budgets.items()
        for left_out in sizes
        if len(sizes) > 3
    ]
    found = [law[1] for law in map(law_of, without) if law]
    if len(found) < 2:
        return "; no interval: each budget needs four sizes"
    error = np.sqrt((len(found) - 1) * np.var(found))
    return f", exponent {exponent - 2 * error:.2f} to {exponent + 2 * error:.2f}"


def report(budgets: Budgets, what: str) -> tuple[float, float] | None:
    """Print the best sizes and the law through them, which is returned."""
    print(f"| training FLOP | best {what} | bits per byte there |\n|---|---|---|")
    for flops, sizes in budgets.items():
        size, bpb = best(sizes)
        print(
            f"| {flops:.0e} | " + ("outside the sizes tried | – |" if np.isnan(size) else f"{size:,.0f} | {bpb:.3f} |")
        )
    if law := law_of(budgets):
        print(f"\nbest {what} N = {law[0]:.3g} · C^{law[1]:.2f}{interval(budgets, law[1])}\n")
    else:
        print("\nno law: fewer than two budgets have their best size within the sizes tried: add sizes\n")
    return law


def draw(budgets: Budgets, law: tuple[float, float] | None, picture: Path) -> None:
    """Plot losses against sizes, and beside that the law if there is one."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    sizes, law_axes = figure.subplots(1, 2)
    for flops, losses in budgets.items():
        line = sizes.semilogx([*losses], [*losses.values()], "o", label=f"{flops:.0e} FLOP")[0]
        along = np.geomspace(min(losses), max(losses))
        sizes.plot(along, parabola(losses)(np.log10(along)), color=line.get_color(), alpha=0.6)
        sizes.plot(*best(losses), "*", color=line.get_color(), markersize=14)
        law_axes.loglog(flops, best(losses)[0], "*", color=line.get_color(), markersize=14)
    sizes.set(xlabel="parameters", ylabel="validation loss (bits per byte)", title="One budget, many sizes")
    if law:
        flops = np.array([*budgets])
        law_axes.plot(flops, law[0] * flops ** law[1], color="grey", label=f"N = {law[0]:.2g} · C^{law[1]:.2f}")
        law_axes.legend()
    law_axes.set(xlabel="training FLOP C", ylabel="parameters N", title="The best size")
    sizes.legend()
    figure.savefig(picture, dpi=110)


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
