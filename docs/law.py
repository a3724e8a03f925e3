"""Curves through losses: the best of several learning rates, and the law of training longer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from docs.estimates import Estimate

FAILED = 1e9  # the loss of a run that failed: more than any that did not


def at_best_rate(rates: Sequence[float], table: Sequence[Sequence[float]], seed: int) -> tuple[float, float, bool]:
    """Return a seed's loss at the others' best rate, that rate, and whether rates bracket it.

    table: losses by rate and seed. If rates bracket the best one, a parabola in ln(rate) goes through the mean losses
    at it and its neighbours. The bottom gives the rate, and a parabola through the seed's own losses the loss there.
    """
    losses = np.array(table)
    # The seed itself has no say in the rate, or luck would choose it.
    others = np.delete(losses, seed, 1) if losses.shape[1] > 1 else losses
    means = others.mean(1)
    best = int(means.argmin())
    loss = float(losses[best, seed])
    rate = rates[best]
    around = slice(best - 1, best + 2)
    if not 0 < best < len(rates) - 1:
        return loss, rate, False
    if losses[around].max() < FAILED and rates[best - 1] > 0:
        x = np.log(rates[around])
        bend, slope, _ = np.polyfit(x, means[around], 2)
        lowest = -slope / (2 * bend)
        loss = float(np.polyval(np.polyfit(x, losses[around, seed], 2), lowest))
        rate = math.exp(lowest)
    return loss, rate, True


@dataclass(frozen=True)
class Law:
    """Loss of the baseline, trained `times` as long: floor + scale · times^-power.

    (Hestness et al. 2017.)
    """

    floor: float
    scale: float
    power: float
    times: tuple[float, ...] = ()
    residuals: tuple[float, ...] = ()
    covariance: np.ndarray = field(default_factory=lambda: np.zeros((3, 3)))
    """The covariance of floor, scale and power, from the residuals."""

    @classmethod
    def fit(cls, times: Sequence[float], losses: Sequence[float]) -> "Law":
        """Fit by least squares, over a grid of powers.

        For each power the fit of scale and floor is linear. The floor is not below 0.
        """
        x = np.array(times)
        y = np.array(losses)
        fits = []
        for power in np.geomspace(0.01, 4, 800).tolist():
            curve = x**-power
            bend = curve - curve.mean()
            floor = max(0.0, float(y.mean() - curve.mean() * (bend @ y) / (bend @ bend)))
            scale = float(curve @ (y - floor) / (curve @ curve))
            residuals = y - floor - scale * curve
            fits.append((float(residuals @ residuals), floor, scale, power, residuals))
        squares, floor, scale, power, residuals = min(fits, key=lambda fit: fit[0])

        # The covariance of the three, from the derivatives of the loss by each.
        slopes = np.stack([np.ones_like(x), x**-power, -scale * np.log(x) * x**-power], 1)
        covariance = np.linalg.pinv(slopes.T @ slopes) * squares / (len(x) - 3)
        return cls(floor, scale, power, tuple(times), tuple(residuals.tolist()), covariance)

    @property
    def freedom(self) -> int:
        return len(self.times) - 3

    def loss(self, times: float) -> float:
        return self.floor + self.scale * times**-self.power

    def times_to(self, loss: float) -> float:
        """Return the training to this loss in multiples of the baseline's, infinite at the floor."""
        return ((loss - self.floor) / self.scale) ** (-1 / self.power) if loss > self.floor else math.inf

    def error(self, figure: Callable[["Law"], float]) -> float:
        """Return the standard error of a figure that is read from the law (delta method)."""
        step = 1e-6
        names = ("floor", "scale", "power")
        moved = [figure(replace(self, **{name: getattr(self, name) + step})) for name in names]
        slopes = (np.array(moved) - figure(self)) / step
        return math.sqrt(max(0.0, float(slopes @ self.covariance @ slopes)))

    def at_equal_cost(self, plain: Estimate, times: float, *errors: tuple[float, float]) -> Estimate:
        """Return a variant's difference from the baseline trained `times` as long.

        plain: the difference at equal tokens. errors: further independent ones, each with its degrees of freedom; the
        law's error is added too.
        """
        shift = self.error(lambda law: law.loss(times) - law.loss(1))
        return plain.less(self.loss(times) - self.loss(1), (shift, self.freedom), *errors)

    def effective_compute(self, plain: Estimate, flops: float) -> tuple[float, float, float]:
        """Return the baseline's FLOPs for a variant's loss, and its errors by seeds and by the law.

        All are in multiples of the variant's FLOPs. flops: the variant's, in multiples of the baseline's.
        """

        def compute(law: Law, difference: float) -> float:
            return law.times_to(law.loss(1) + difference) / flops

        better = compute(self, plain.mean - plain.error)
        worse = compute(self, plain.mean + plain.error)
        own = self.error(lambda law: compute(law, plain.mean))
        return compute(self, plain.mean), (better - worse) / 2, own
