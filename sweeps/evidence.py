"""The sequential signed-rank test of paired differences.

It may look after every pair, up to a number of pairs that is fixed at the beginning. It asks whether a difference is as
likely as its negative. If two variants do not differ, that holds for any law of their results: the two runs of a pair
could be swapped. For a skewed law it judges the typical pair, not the mean.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

MOST_PAIRS = 22  # cuts() follows 2^pairs strings of signs: 3 s and 200 MB for 22
EQUAL_PAIRS = 3  # pairs without any difference that end a comparison


@functools.cache
def cuts(alpha: float, pairs: int, late: bool = False) -> list[int]:
    """Return the critical values k_1 .. k_pairs of the sequential signed-rank test.

    Pair n rejects a centre if at most k_n of the n(n+1)/2 Walsh averages lie on one side of it, which is Wilcoxon's
    statistic (Tukey 1949). k_n = -1 rejects nothing. Each k_n is the largest that keeps the level spent up to pair n:
    alpha · n / pairs, or alpha · (n / pairs)³ if `late` (alpha spending, Lan and DeMets 1983).
    """
    # Follow the probability of each string of n signs, in the order of |d|: bit r is the sign of the difference with
    # rank r. mass is the probability of a string that is not rejected yet; sums are the ranks of its positive signs.
    mass = np.ones(1)
    sums = np.zeros(1, int)
    found: list[int] = []
    for n in range(1, pairs + 1):
        # Add a difference: its sign is a fair coin, and its rank uniform among n, independent of the earlier ones.
        grown = np.zeros(2**n)
        for rank in range(n):
            # Axes: the bits above the new difference's rank, its own bit, and the bits below.
            higher_sign_lower = grown.reshape(-1, 2, 2**rank)
            higher_sign_lower += mass.reshape(-1, 1, 2**rank) / (2 * n)
        sums = np.concatenate([sums, sums + n])
        # Reject as many of the most extreme strings as the level allows. The mass that `grown` lacks was spent before.
        smaller_side = np.minimum(sums, n * (n + 1) // 2 - sums)
        spent = np.bincount(smaller_side, grown).cumsum() + 1 - grown.sum()
        allowed = alpha * (n / pairs) ** (3 if late else 1) + 1e-12  # rounding must not cost a value
        found.append(int(np.searchsorted(spent, allowed, side="right")) - 1)
        mass = np.where(smaller_side <= found[-1], 0, grown)
    return found


def confidence_sequence(
    differences: Sequence[float], alpha: float, pairs: int = 20, late: bool = False
) -> tuple[float, float]:
    """Return the interval of the centres that are not rejected: two of the Walsh averages.

    With a chance of 1 - alpha it holds the centre of symmetry after every one of the pairs.
    """
    k = cuts(alpha, pairs, late)[len(differences) - 1]
    if k < 0:
        return -math.inf, math.inf
    averages = sorted((x + y) / 2 for place, x in enumerate(differences) for y in differences[place:])
    return averages[k], averages[-1 - k]


def judge(
    differences: Sequence[float],
    alpha: float,
    delta: float | None = None,
    larger: bool = False,
    pairs: int = 20,
    give_up: int | None = None,
) -> str:
    """Return better, worse, no difference or dropped; "" if none is certain yet.

    alpha: the chance of a false verdict after any of the pairs.
    delta: the smallest difference that matters. Given one, the level is spent late: a false "better" must not come
    before "no difference".
    larger: whether a positive difference is better.
    give_up: the pair from which on differences are dropped whose mean is not on the better side.
    """
    count = len(differences)
    if count >= EQUAL_PAIRS and not any(differences):
        return f"no difference: {count} pairs are equal"
    if delta is not None:
        # Two one-sided tests at alpha each. They may reject after different pairs, so intersect the intervals.
        known = [confidence_sequence(differences[:n], 2 * alpha, pairs, late=True) for n in range(1, count + 1)]
        lows, highs = zip(*known, strict=True)
        if -delta <= max(lows) and min(highs) <= delta:
            return f"no difference beyond {delta:g}"
    low, high = confidence_sequence(differences, alpha, pairs, late=delta is not None)
    if not low <= 0 <= high:
        return "better" if (low > 0) == larger else "worse"
    gain = math.fsum(differences) if larger else -math.fsum(differences)
    if give_up is not None and count >= give_up and not gain > 0:
        return f"dropped: not ahead after {count} pairs"
    return ""
