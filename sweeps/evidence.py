"""What paired differences say: t-tests, Holm's correction, and a test that may be looked at after every pair."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WIDTH = 2.0  # g, the standard deviation of effects that the e-value expects, in deviations of a pair's difference


def p_value(t: float, freedom: float) -> float:
    """Return the chance of a Student t at least as far from 0: with t = √freedom tan θ its density is cos θ's power."""
    start = math.atan(abs(t) / math.sqrt(freedom))
    steps = 2000
    width = (math.pi / 2 - start) / steps
    tail = float(np.sum(np.cos(start + (np.arange(steps) + 0.5) * width) ** (freedom - 1))) * width
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return min(1.0, tail / whole)


def t_quantile(p: float, freedom: float) -> float:
    """Return the t whose two-sided p-value this is, by bisection."""
    low, high = 0.0, 1.0
    while p_value(high, freedom) > p:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > p else (low, middle)
    return high


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values adjusted so that one below α is false with a chance of at most α, however many (Holm 1979)."""
    adjusted = list(ps)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        adjusted[index] = least = max(least, min(1.0, (len(ps) - rank) * ps[index]))
    return adjusted


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error with its degrees of freedom, and the p of a two-sided t-test that it is zero."""

    mean: float
    error: float
    freedom: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the mean of two or more values."""
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), error, len(values) - 1)

    @property
    def p(self) -> float:
        return p_value(self.mean / self.error, self.freedom) if self.error else float(self.mean == 0)

    def less(self, shift: float, *errors: tuple[float, float]) -> "Estimate":
        """Subtract a shift, which has errors of its own, each with its degrees of freedom (Satterthwaite 1946)."""
        parts = [(error**2, freedom) for error, freedom in ((self.error, self.freedom), *errors) if error]
        variance = sum(square for square, _ in parts)
        freedom = variance**2 / sum(square**2 / freedom for square, freedom in parts) if parts else self.freedom
        return Estimate(self.mean - shift, math.sqrt(variance), freedom)


def e_value(differences: Sequence[float]) -> float:
    """Return how many times likelier the differences are with an effect than with none, whatever their deviation.

    The differences are taken as normal; the effect, in their deviations, as N(0, WIDTH²). Where there is none, E ever
    reaches 1/α with a chance of at most α, looked at after each (Pérez-Ortiz, Lardy, de Heide and Grünwald 2022).
    """
    n = len(differences)
    square = sum(x * x for x in differences)
    scale = 1 + n * WIDTH**2
    ratio = math.fsum(differences) ** 2 / square if square else 0.0
    return scale**-0.5 * (1 - WIDTH**2 * ratio / scale) ** (-n / 2)


def confidence_sequence(differences: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return the means that e_value() does not reject: after every pair they hold the true one but for a chance α."""
    n = len(differences)
    mean = statistics.fmean(differences)
    scale = 1 + n * WIDTH**2
    most = (1 - (alpha**2 / scale) ** (1 / n)) * scale / WIDTH**2  # (Σx)² / Σx² that is not rejected
    if most >= n:
        return -math.inf, math.inf
    squares = sum((x - mean) ** 2 for x in differences)
    half = math.sqrt(most * squares / (n * (n - most)))
    return mean - half, mean + half


def judge(differences: Sequence[float], alpha: float, delta: float | None = None, larger: bool = False) -> str:
    """Return better, worse or no difference, as the confidence sequence of the differences says; "" for undecided."""
    low, high = confidence_sequence(differences, alpha)
    if delta is not None and -delta <= low and high <= delta:
        return f"no difference beyond {delta:g}"
    if low <= 0 <= high:
        return ""
    return "better" if (low > 0) == larger else "worse"
