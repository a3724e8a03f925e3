"""Measure the error rates and power of hydra/sweeper=decide: the table of docs/sweeps.md.

    python docs/decide_worth.py [RUNS.csv]

RUNS.csv is docs/results/null_runs.csv by default. It has runs of one setting with 40 seeds or more, and of another with
some of these seeds. The script draws 1,000 comparisons of 20 pairs without a true difference in two ways: from runs of
the first setting with different seeds, and from both settings with the same seed, less their mean difference. For the
power it adds 0.5% of the loss to the latter.
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from sweeps.decide import ALPHA
from sweeps.evidence import Estimate, judge

COMPARISONS, PAIRS, SOON, EFFECT = 1000, 20, 8, 0.005


def lower_wins(differences: Sequence[float]) -> str:
    return "better" if np.mean(differences) < 0 else "worse"


def t_test(differences: Sequence[float]) -> str:
    return lower_wins(differences) if len(differences) > 1 and Estimate.of(differences).p < ALPHA else ""


def verdict(rule: Callable[[Sequence[float]], str], differences: np.ndarray) -> str:
    """Apply the rule after each pair and return its first verdict, or "" if there is none."""
    return next(filter(None, (rule(differences[:n].tolist()) for n in range(1, len(differences) + 1))), "")


def main(file: Path) -> None:
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    for run in csv.DictReader(file.open(encoding="utf-8")):
        losses[run["attention"]][run["seed"]] = float(run["val_bpb"])
    (name, first), (other, second) = losses.items()
    one, draw = np.array([*first.values()]), np.random.default_rng(0)
    pairs = np.array([second[seed] - first[seed] for seed in first if seed in second])
    apart = [np.subtract(*draw.permutation(one)[: 2 * PAIRS].reshape(2, -1)) for _ in range(COMPARISONS)]
    same = [draw.choice(pairs - pairs.mean(), PAIRS) * draw.choice([-1, 1], PAIRS) for _ in range(COMPARISONS)]
    print(f"{name}: {len(one)} seeds, {one.mean():.4f} ± {one.std(ddof=1):.4f}. {other}: {len(pairs)} of them.")
    print(f"A pair's difference: ± {np.std(apart):.4f} of different seeds, ± {pairs.std(ddof=1):.4f} of the same.\n")
    print("| | nothing differs, different seeds: decided | nothing differs, same seed: decided | 0.5% worse: found |")
    print("|---|---:|---:|---:|")
    rules = {"lower loss wins, of one pair": lower_wins, "t-test after every pair": t_test}
    for label, rule in (rules | {"`hydra/sweeper=decide`": lambda differences: judge(differences, ALPHA)}).items():
        wrong = [np.mean([verdict(rule, each) != "" for each in null]) for null in (apart, same)]
        found = np.mean([verdict(rule, each[:SOON] + EFFECT * one.mean()) == "worse" for each in same])
        print(f"| {label} | {wrong[0]:.1%} | {wrong[1]:.1%} | {found:.1%} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results/null_runs.csv")
