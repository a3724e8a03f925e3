"""Measure the error rates and the power of hydra/sweeper=decide for docs/sweeps.md.

    python docs/decide_worth.py [RUNS.csv]      comparisons drawn from recorded runs
    python docs/decide_worth.py laws            comparisons drawn from laws: ten minutes
    python docs/decide_worth.py nights          nights of a hundred ideas: half an hour

RUNS.csv is docs/results/null_runs.csv by default. It has runs of one setting with 40 seeds or more, and of another with
some of these seeds. The script draws 1,000 comparisons of 20 pairs without a true difference in two ways: from runs of
the first setting with different seeds, and from both settings with the same seed, less their mean difference. For the
power it adds 0.25% of the loss to the latter.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.errors import SettingsError
from common.mistakes import mistakes_explained
from docs.command import arguments_asked, number_in, read_table
from docs.estimates import p_value
from sweeps.decide import ALPHA, CONFIRM_ALPHA
from sweeps.evidence import judge

COMPARISONS = 1000
PAIRS = 20
EFFECT = 0.0025
"""Of the loss."""
NULLS = 20_000
"""Comparisons without a difference, for each law."""
FINDS = 4_000
"""Comparisons for every other cell."""
NIGHTS = 1000
IDEAS = 100
REAL = 10
"""Ideas of a night that are better, by one deviation of a pair's difference."""
EFFECTS = (0.5, 1, 2)
MARGINS = (0.5, 0.75, 1)

Rule = Callable[[Sequence[float]], str]
Law = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

# Laws of a single run, with half the variance of a pair's difference.
RUNS: dict[str, Law] = {
    "normal": lambda draw, shape: draw.normal(size=shape) / 2**0.5,
    "t, 3 degrees of freedom": lambda draw, shape: draw.standard_t(3, shape) / 6**0.5,
    "lognormal": lambda draw, shape: draw.lognormal(size=shape) / (2 * (np.e - 1) * np.e) ** 0.5,
}
# Laws of a pair's difference with a standard deviation of 1. All are symmetric, as differences are if nothing differs.
LAWS: dict[str, Law] = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "t, 3 degrees of freedom": lambda draw, shape: draw.standard_t(3, shape) / 3**0.5,
    "Laplace": lambda draw, shape: draw.laplace(0, 0.5**0.5, shape),
    "uniform": lambda draw, shape: draw.uniform(-(3**0.5), 3**0.5, shape),
    "two points": lambda draw, shape: draw.choice([-1.0, 1.0], shape),
    "lognormal less lognormal": lambda draw, shape: RUNS["lognormal"](draw, shape) - RUNS["lognormal"](draw, shape),
}


def lower_wins(differences: Sequence[float]) -> str:
    return "better" if np.mean(differences) < 0 else "worse"


def t_test(differences: Sequence[float]) -> str:
    count = len(differences)
    if count < 2:
        return ""
    with np.errstate(all="ignore"):  # of two equal differences t is infinite
        t = np.mean(differences) / (np.std(differences, ddof=1) / count**0.5)
    is_far = abs(t) > 1.96  # otherwise no number of pairs has p < 0.05, and p takes time
    return lower_wins(differences) if is_far and p_value(t, count - 1) < ALPHA else ""


def decide(differences: Sequence[float]) -> str:
    return judge(differences, ALPHA)


def first_verdict(rule: Rule, differences: np.ndarray) -> tuple[str, int]:
    """Return the first verdict of a rule that looks after each pair, or "", and the pairs that it took."""
    known = differences.tolist()
    for count in range(1, len(known) + 1):
        verdict = rule(known[:count])
        if verdict:
            return verdict, count
    return "", len(known)


def verdict(rule: Rule, differences: np.ndarray) -> str:
    return first_verdict(rule, differences)[0]


def share(rule: Rule, comparisons: np.ndarray) -> float:
    """Return the share of comparisons [N, pairs] in which the rule reaches a verdict."""
    return float(np.mean([verdict(rule, differences) != "" for differences in comparisons]))


def print_laws(nulls: int = NULLS, finds: int = FINDS) -> None:
    """Print the table of laws: shares of comparisons with a verdict; given a delta, with "no difference"."""
    found = [f"effect {effect:g}" for effect in EFFECTS]
    none = [f"no effect, `delta` {margin:g}" for margin in MARGINS]
    heads = ["law of the differences", "no effect", *found, *none]
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    draw = np.random.default_rng(0)
    for name, law in LAWS.items():
        cells = [share(decide, law(draw, (nulls, PAIRS)))]
        cells += [share(decide, law(draw, (finds, PAIRS)) + effect) for effect in EFFECTS]
        for margin in MARGINS:
            comparisons = law(draw, (finds, PAIRS))
            found = [verdict(partial(judge, alpha=ALPHA, delta=margin), each) for each in comparisons]
            cells.append(np.mean([each.startswith("no") for each in found]))
        print(f"| {name} | {' | '.join(f'{cell:.1%}' for cell in cells)} |", flush=True)


def night(draw: np.random.Generator, law: Law, rule: Rule, confirms: bool, real: int) -> tuple[int, int, int]:
    """Return how many false finds, real finds and runs a night of ideas has.

    real: the number of ideas that are better. All ideas share the runs of one baseline; each confirmation has its own.
    """
    effects = np.where(np.arange(IDEAS) < real, -1.0, 0.0)
    baseline = law(draw, (PAIRS,))
    found = [0, 0]
    runs = PAIRS
    for effect in effects:
        result, pairs = first_verdict(rule, law(draw, (PAIRS,)) + effect - baseline)
        runs += pairs
        if result == "better" and confirms:
            fresh = law(draw, (PAIRS,)) + effect - law(draw, (PAIRS,))
            result, pairs = first_verdict(partial(judge, alpha=CONFIRM_ALPHA), fresh)
            runs += 2 * pairs
        found[int(effect < 0)] += result == "better"
    return *found, runs


def print_nights(nights: int = NIGHTS) -> None:
    """Print the table of nights: null nights with a false find, finds of ten real ideas, and runs."""
    print("| law of the runs | rule | null nights with a false find | finds of ten | runs an idea |")
    print("|---|---|---:|---:|---:|")
    dropping = partial(judge, alpha=ALPHA, give_up=5)
    rules: dict[str, tuple[Rule, bool]] = {
        "lower loss wins, of one pair": (lower_wins, False),
        "p < 0.05 by t, after every pair": (t_test, False),
        "`decide`": (decide, False),
        "`decide`, given up from pair 5 on": (dropping, False),
        "`decide`, given up from pair 5 on, then confirmed": (dropping, True),
    }
    for name, law in RUNS.items():
        for label, (rule, confirms) in rules.items():
            draw = np.random.default_rng(0)
            null = np.array([night(draw, law, rule, confirms, real=0) for _ in range(nights)])
            ten = np.array([night(draw, law, rule, confirms, real=REAL) for _ in range(nights)])
            figures = f"{(null[:, 0] > 0).mean():.1%} | {ten[:, 1].mean():.2f} | {null[:, 2].mean() / IDEAS:.1f}"
            print(f"| {name} | {label} | {figures} |", flush=True)


def print_runs(file: Path) -> None:
    """Print the table of recorded runs."""
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    for run in read_table(file, "attention", "seed", "val_bpb"):
        losses[run["attention"]][run["seed"]] = number_in(run, "val_bpb")
    if len(losses) != 2:
        raise SettingsError(f"{file} has runs of {len(losses)} attentions", "give a table with runs of two")
    (name, first), (other, second) = losses.items()
    one = np.array([*first.values()])
    draw = np.random.default_rng(0)
    pairs = np.array([second[seed] - first[seed] for seed in first if seed in second])
    apart = np.array([np.subtract(*draw.permutation(one)[: 2 * PAIRS].reshape(2, -1)) for _ in range(COMPARISONS)])
    signs = draw.choice([-1, 1], (COMPARISONS, PAIRS))
    same = draw.choice(pairs - pairs.mean(), (COMPARISONS, PAIRS)) * signs
    print(f"{name}: {len(one)} seeds, {one.mean():.4f} ± {one.std(ddof=1):.4f}. {other}: {len(pairs)} of them.")
    print(f"A pair's difference: ± {np.std(apart):.4f} of different seeds, ± {pairs.std(ddof=1):.4f} of the same.\n")
    print("| | nothing differs, different seeds: decided | nothing differs, same seed: decided | 0.25% worse: found |")
    print("|---|---:|---:|---:|")
    rules = {"lower loss wins, of one pair": lower_wins, "t-test after every pair": t_test}
    for label, rule in (rules | {"`hydra/sweeper=decide`": decide}).items():
        found = np.mean([verdict(rule, each) == "worse" for each in same + EFFECT * one.mean()])
        print(f"| {label} | {share(rule, apart):.1%} | {share(rule, same):.1%} | {found:.1%} |")


if __name__ == "__main__":
    with mistakes_explained():
        typed = arguments_asked(__doc__, "[RUNS.csv|laws|nights]")
        if typed == ["laws"]:
            print_laws()
        elif typed == ["nights"]:
            print_nights()
        else:
            print_runs(Path(*typed or [Path(__file__).parent, "results/null_runs.csv"]))
