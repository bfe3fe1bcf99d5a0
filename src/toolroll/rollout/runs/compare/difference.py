"""`Difference`: the difference between two runs' means over tasks, its interval and its power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, comb, copysign, expm1, log1p, sqrt
from statistics import NormalDist, fmean

LEVEL = 0.95
POWER = 0.8
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean over `tasks` of each task's difference, and its standard `error`.

    A task is one observation, because its samples are not independent. So the interval is that of a
    paired t-test over tasks. The squared deviations add up to at least those of one task whose
    reward changed by its whole range: otherwise, runs without a change would have an interval of
    the width zero. (tests/support/simulated_benchmarks.py compares this interval with others.)
    """

    value: float
    error: float
    tasks: int

    @classmethod
    def of(cls, means: Sequence[tuple[float, float]], span: float = 1.0) -> Difference:
        """Return the difference for the `means` of each task. `span`: the range of rewards."""
        changes = [after - before for before, after in means]
        count, mean = len(changes), fmean(changes)
        squares = max(sum((change - mean) ** 2 for change in changes), span**2)
        return cls(mean, sqrt(squares / max(1, count - 1) / count), count)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the interval that contains the true difference with the probability `level`."""
        width = self._quantile((1 + level) / 2) * self.error
        return self.value - width, self.value + width

    def p_value(self, true: float = 0.0) -> float:
        """Return the two-sided p-value of the hypothesis that the difference is `true`."""
        return 2 * self._tail(abs(self.value - true) / self.error)

    def p_not_equivalent(self, margin: float) -> float:
        """Return the p-value of the hypothesis that the difference is at least `margin`, in one
        direction or the other (two one-sided tests).
        """
        return self._tail((margin - abs(self.value)) / self.error)

    def power(self, true: float) -> float:
        """Return the probability that such runs show a difference if it is `true`."""
        limit, shift = self._quantile((1 + LEVEL) / 2), true / self.error
        return _NORMAL.cdf(shift - limit) + _NORMAL.cdf(-shift - limit)

    @property
    def detectable(self) -> float:
        """The smallest true difference that such runs show with the probability `POWER`."""
        return (self._quantile((1 + LEVEL) / 2) + _NORMAL.inv_cdf(POWER)) * self.error

    def tasks_for(self, true: float) -> int:
        """Return how many such tasks show a difference of `true` with the probability `POWER`."""
        return ceil(self.tasks * (self.detectable / true) ** 2)

    # Wallace's transformation of Student's t to a normal variable (1959). The error of a p-value
    # near 0.05 is below 0.001 from 5 tasks on, and below 0.0001 from 10 tasks on.

    def _tail(self, t: float) -> float:
        """Return the probability that Student's t is larger than `t`."""
        freedom = max(1, self.tasks - 1)
        normal = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log1p(t * t / freedom))
        return _NORMAL.cdf(copysign(normal, -t))

    def _quantile(self, probability: float) -> float:
        """Return the t that Student's t exceeds with the probability 1 - `probability`."""
        freedom = max(1, self.tasks - 1)
        normal = (8 * freedom + 3) / (8 * freedom + 1) * _NORMAL.inv_cdf(probability)
        return sqrt(freedom * expm1(normal**2 / freedom))


def mcnemar(worse: int, better: int) -> float:
    """Return the p-value of McNemar's exact test for `worse` and `better` discordant pairs."""
    count = worse + better
    tail = sum(comb(count, k) for k in range(min(worse, better) + 1))
    return min(1.0, 2 * tail / (1 << count))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return `p_values` after Holm's correction for several tests, in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
