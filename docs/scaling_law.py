"""Fit and draw a scaling law:  python docs/scaling_law.py SWEEP [PICTURE.png]

SWEEP is the folder of  python train.py -m +experiment=scaling  , or of any sweep over max_flops and one size setting;
the script reads its leaderboard.csv. Each size has its best learning rate, on average over the seeds. For every compute
budget, a parabola of loss against log(parameters) gives the best size. A line through the best sizes in log-log space
is the power law (Hoffmann et al. 2022, approach 2), for parameters with embeddings and without. An exponent's interval
is two jackknife standard errors each way (Quenouille 1956): the law is fitted again without each of the points.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.errors import SettingsError
from common.mistakes import mistakes_explained
from docs.command import arguments_asked, existing, number_in, read_table

Budgets = dict[float, dict[float, float]]  # FLOP: parameters: bits per byte
ALIKE = ("attention", "text_hash")  # a parabola through several of these has no meaning
COLUMNS = {"parameters": "parameters", "parameters without embeddings": "parameters_in_blocks"}


def read_budgets(sweep: Path, column: str) -> Budgets:
    """Return the mean loss over seeds by budget and size (`column`), at each size's best rate.

    A rate with fewer finished seeds than another of its size does not count: those that are left may be the lucky ones.
    """
    table = sweep / "leaderboard.csv"
    rates = defaultdict[tuple[float, float, str], list[float]](list)
    found_in: dict[str, set[str]] = {name: set() for name in ALIKE}
    for row in read_table(table, "status", "val_bpb"):
        if row["status"] == "finished" and row.get("max_flops") and row.get(column) and row["val_bpb"]:
            key = number_in(row, "max_flops"), number_in(row, column), row.get("optimizer.lr", "")
            rates[key].append(number_in(row, "val_bpb"))
            for name in ALIKE:
                found_in[name].add(row.get(name) or "")
    several = [name for name in ALIKE if len(found_in[name]) > 1]
    if several:
        raise SettingsError(f"{table} has several values of {' and '.join(several)}", "give a sweep of sizes alone")
    most: dict[tuple[float, float], int] = defaultdict(int)
    for (flops, size, _), found in rates.items():
        most[flops, size] = max(most[flops, size], len(found))
    budgets: Budgets = defaultdict(dict)
    for (flops, size, _), found in sorted(rates.items()):
        if len(found) == most[flops, size]:
            budgets[flops][size] = min(budgets[flops].get(size, np.inf), float(np.mean(found)))
    return {flops: sizes for flops, sizes in budgets.items() if len(sizes) >= 3}


def parabola(sizes: dict[float, float]) -> np.polynomial.Polynomial:
    return np.polynomial.Polynomial.fit(np.log10([*sizes]), [*sizes.values()], 2)


def best(sizes: dict[float, float]) -> tuple[float, float]:
    """Return the parabola's minimum (parameters, loss); NaN if outside the sizes tried."""
    curve = parabola(sizes)
    _, b, a = curve.convert().coef
    size = 10 ** (-b / (2 * a)) if a > 0 else np.nan
    return (size, curve(np.log10(size))) if min(sizes) <= size <= max(sizes) else (np.nan, np.nan)


def law_of(budgets: Budgets) -> tuple[float, float] | None:
    """Fit N = a · C^b to the best sizes by least squares in logarithms; None for fewer than two."""
    found = [(flops, size) for flops, sizes in budgets.items() if np.isfinite(size := best(sizes)[0])]
    if len(found) < 2:
        return None
    b, a = np.polyfit(*np.log(found).T, 1)
    return float(np.exp(a)), float(b)


def interval(budgets: Budgets, exponent: float) -> str:
    """Return the exponent's interval, two jackknife standard errors each way, as text."""
    without = [
        budgets | {flops: {size: loss for size, loss in sizes.items() if size != left_out}}
        for flops, sizes in budgets.items()
        for left_out in sizes
        if len(sizes) > 3
    ]
    found = [law[1] for law in map(law_of, without) if law]
    if len(found) < 2:
        return "no interval: each budget needs four sizes"
    error = np.sqrt((len(found) - 1) * np.var(found))
    return f"exponent {exponent - 2 * error:.2f} to {exponent + 2 * error:.2f}"


def report(found: dict[str, Budgets]) -> None:
    """Print the best sizes, with and without embeddings, and the laws through them."""
    counted = [name for name, budgets in found.items() if budgets]
    print(f"| training FLOP | bits per byte at best | {' | '.join(f'best {name}' for name in counted)} |")
    print("|" + "---:|" * (2 + len(counted)))
    for flops, sizes in found["parameters"].items():
        cells = [f"{flops:.0e}", f"{best(sizes)[1]:.3f}", *(f"{best(found[name][flops])[0]:,.0f}" for name in counted)]
        print(f"| {' | '.join('outside the sizes tried' if cell == 'nan' else cell for cell in cells)} |")
    for name in counted:
        law = law_of(found[name])
        said = f"N = {law[0]:.3g} · C^{law[1]:.2f}, {interval(found[name], law[1])}" if law else "no law: add sizes"
        print(f"\nBest {name}: {said}.")


def draw(budgets: Budgets, picture: Path) -> None:
    """Plot losses against sizes and, next to them, the law if there is one."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    sizes, law_axes = figure.subplots(1, 2)
    for flops, losses in budgets.items():
        line = sizes.semilogx([*losses], [*losses.values()], "o", label=f"{flops:.0e} FLOP")[0]
        along = np.geomspace(min(losses), max(losses))
        sizes.plot(along, parabola(losses)(np.log10(along)), color=line.get_color(), alpha=0.6)
        sizes.plot(*best(losses), "*", color=line.get_color(), markersize=14)
        law_axes.loglog(flops, best(losses)[0], "*", color=line.get_color(), markersize=14)
    sizes.set(xlabel="parameters", ylabel="validation loss (bits per byte)", title="One budget, many sizes")
    if law := law_of(budgets):
        flops = np.array([*budgets])
        law_axes.plot(flops, law[0] * flops ** law[1], color="grey", label=f"N = {law[0]:.2g} · C^{law[1]:.2f}")
        law_axes.legend()
    law_axes.set(xlabel="training FLOP C", ylabel="parameters N", title="The best size")
    sizes.legend()
    figure.savefig(picture, dpi=110)


def main(sweep: Path, picture: Path) -> None:
    found = {name: read_budgets(sweep, column) for name, column in COLUMNS.items()}
    if len(found["parameters"]) < 2:
        problem = f"{sweep} has fewer than two values of max_flops with three sizes each"
        raise SettingsError(problem, "sweep both, as +experiment=scaling does")
    report(found)
    draw(found["parameters"], picture)
    print(f"\ndrawn in {picture}")


if __name__ == "__main__":
    with mistakes_explained():
        sweep, *pictures = arguments_asked(__doc__, "SWEEP", "[PICTURE.png]")
        main(existing(sweep), Path(*pictures or [sweep, "scaling_law.png"]))
