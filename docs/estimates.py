"""Means with their errors: Student's t, and Holm's correction for several tests."""

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def p_value(t: float, freedom: float) -> float:
    """Return the two-sided p-value of Student's t with so many degrees of freedom.

    With t = √freedom tan θ the density is a power of cos θ, which the midpoint rule integrates from θ to π/2.
    """

    def area(start: float) -> float:
        width = math.pi / 2 - start
        angles = start + width * (np.arange(2000) + 0.5) / 2000
        return width * float(np.mean(np.cos(angles) ** (freedom - 1)))

    return area(math.atan(abs(t) / math.sqrt(freedom))) / area(0)


def t_quantile(p: float, freedom: float) -> float:
    """Return the t below 10,000 with the two-sided p-value p, to six digits after the point."""
    # p falls as t rises: bisect wants a rising key, so both are negated.
    millionths = bisect.bisect_left(range(10**10), -p, key=lambda millionths: -p_value(millionths / 1e6, freedom))
    return millionths / 1e6


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979).

    If no effect is real, the chance that any of them is below α is at most α.
    """
    adjusted = list(ps)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = least
    return adjusted


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and degrees of freedom."""

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
        """The p-value of a two-sided t-test that the mean is zero."""
        return p_value(self.mean / self.error, self.freedom) if self.error else float(self.mean == 0)

    def less(self, shift: float, *errors: tuple[float, float]) -> "Estimate":
        """Return the estimate less a shift with independent errors (Satterthwaite 1946).

        errors: pairs of a standard error and its degrees of freedom.
        """
        parts = [(error**2, freedom) for error, freedom in ((self.error, self.freedom), *errors) if error]
        variance = sum(square for square, _ in parts)
        freedom = variance**2 / sum(square**2 / freedom for square, freedom in parts) if parts else self.freedom
        return Estimate(self.mean - shift, math.sqrt(variance), freedom)
