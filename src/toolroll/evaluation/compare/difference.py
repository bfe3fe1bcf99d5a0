"""`Difference`: the difference between two runs' means over tasks, its interval and its power."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, sqrt
from statistics import NormalDist, fmean

from toolroll.rollout.errors import UsageError

try:
    from scipy.stats import binomtest
    from scipy.stats import t as student
except ImportError as error:
    raise UsageError(
        'comparing runs needs scipy, the extra `compare` of toolroll: pip install -e ".[compare]"'
    ) from error

LEVEL = 0.95
POWER = 0.8
_NORMAL = NormalDist()
_MOST_TASKS = 10**12


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean over `tasks` of each task's difference, and its standard `error`. `span` is the
    range of rewards. `least_error`: the error is that of
    one task that changed.

    The interval is that of a paired t-test over tasks, because the samples of one task are not
    independent. The squared deviations add up to at least those of one task whose reward changed by
    its whole range, so that no interval has the width zero.
    """

    value: float
    error: float
    tasks: int
    span: float = 1.0
    least_error: bool = False

    @classmethod
    def of(cls, means: Sequence[tuple[float, float]], span: float = 1.0) -> Difference:
        """Return the difference for the `means` of each task."""
        changes = [after - before for before, after in means]
        count, mean = len(changes), fmean(changes)
        squares = sum((change - mean) ** 2 for change in changes)
        error = sqrt(max(squares, span**2) / max(1, count - 1) / count)
        return cls(mean, error, count, span, least_error=squares < span**2)

    def interval(self) -> tuple[float, float]:
        """Return the interval that contains the true difference with the probability `LEVEL`. It
        has no difference that is impossible.
        """
        width = self._limit * self.error
        return max(-self.span, self.value - width), min(self.span, self.value + width)

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
        shift = true / self.error
        return _NORMAL.cdf(shift - self._limit) + _NORMAL.cdf(-shift - self._limit)

    @property
    def detectable(self) -> float:
        """The smallest true difference that such runs show with the probability `POWER`."""
        return (self._limit + _NORMAL.inv_cdf(POWER)) * self.error

    def tasks_for(self, true: float) -> int:
        """Return how many such tasks show a difference of `true` with the probability `POWER`."""
        return ceil(self.tasks * (self.detectable / true) ** 2)

    def _tail(self, t: float) -> float:
        """Return the probability that Student's t is larger than `t`."""
        return float(student.sf(t, max(1, self.tasks - 1)))

    @property
    def _limit(self) -> float:
        """The t that is not exceeded, in either direction, with the probability `LEVEL`."""
        return float(student.ppf((1 + LEVEL) / 2, max(1, self.tasks - 1)))


def tasks_for_gate(loss: float, span: float, level: float) -> int | None:
    """Return the smallest number of tasks that shows, at the significance `level`, that the reward
    did not fall by `loss`, if no task changed. Return None if no number does.
    """

    def shows(tasks: int) -> bool:
        error = span / sqrt(max(1, tasks - 1) * tasks)
        return Difference(0.0, error, tasks, span).p_value(-loss) <= level

    return bisect_left(range(_MOST_TASKS), True, lo=1, key=shows) if loss else None


def mcnemar(worse: int, better: int) -> float:
    """Return the p-value of McNemar's exact test for `worse` and `better` discordant pairs."""
    if not worse + better:
        return 1.0
    return float(binomtest(worse, worse + better).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return `p_values` after Holm's correction for several tests, in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    tests = range(len(order), 0, -1)
    scaled = (min(1.0, n * p_values[index]) for n, index in zip(tests, order, strict=True))
    return [p for _, p in sorted(zip(order, accumulate(scaled, max), strict=True))]
