"""Unbiased estimates of pass@k and pass^k, each with a 95 % interval.

Invariants:

- For each task with n samples, an estimate averages over all C(n, k) ways to choose k samples.
- Intervals are over tasks, because the samples of one task are not independent draws from the
  benchmark: Agresti and Coull's, with Student's t and the variance of the tasks. They also leave
  room for tasks that were not drawn: with 10 tasks that all failed, 31 % may pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean, stdev

from toolroll.rollout.errors import UsageError

_NORMAL = NormalDist().inv_cdf(0.975)
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""The 97.5 % quantiles of Student's t with 1 to 10 degrees of freedom."""


def passed(reward: float) -> bool:
    """Return True if `reward` is 1 (tau-bench's rule, with its margin of 1e-6). A reward above 1 is
    not a pass, because its environment does not grade from 0 to 1.
    """
    return 1 - 1e-6 <= reward <= 1 + 1e-6


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its 95 % interval [low, high]."""

    value: float
    low: float
    high: float


class UnequalSamplesError(UsageError):
    """Raised if tasks have different numbers of graded samples. If samples are missing because
    their episodes failed, pass@k and pass^k may be biased.
    """


def mean_over_tasks(values: Sequence[float]) -> Estimate:
    """Return the mean and its interval. Raise `ValueError` if `values` is empty."""
    if not values:
        raise ValueError("no task is graded")
    mean, count = fmean(values), len(values)
    bottom, top = min(0.0, *values), max(1.0, *values)
    # Clopper and Pearson: with a probability of 2.5 %, n drawn tasks have none of a share of this
    # size. The mean of the tasks in this share is between `bottom` and `top`.
    unseen = 1 - 0.025 ** (1 / count)
    low, high = mean - unseen * (mean - bottom), mean + unseen * (top - mean)
    if count > 1 and bottom < mean < top:
        # the variance, as a share of what it would be if each task had `bottom` or `top`
        share = (deviation := stdev(values)) / (mean - bottom) * (deviation / (top - mean))
        added = _quantile(count - 1) ** 2 * share / count
        middle = (mean + added * (bottom + top) / 2) / (1 + added)
        width = sqrt(added * (middle - bottom) * (top - middle) / (1 + added))
        low, high = min(low, max(bottom, middle - width)), max(high, min(top, middle + width))
    return Estimate(mean, low, high)


def _quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by Cornish and Fisher's expansion above 10."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def pass_hat_k(rewards: Sequence[Sequence[float]], k: int) -> float:
    """Return pass^k: the probability that k samples of a task all pass, averaged over tasks.

    If c of a task's n samples pass, the probability is C(c, k) / C(n, k). `rewards[task]` are the
    task's graded rewards. Raise `ValueError` if a task has fewer than k of them.
    """
    return fmean(_by_task(rewards, k, _all_pass))


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> float:
    """Return pass@k: the probability that at least one of k samples of a task passes, averaged over
    tasks.

    If c of a task's n samples pass, the probability is 1 - C(n - c, k) / C(n, k). Arguments and
    errors are the same as in `pass_hat_k`.
    """
    return fmean(_by_task(rewards, k, _any_passes))


def pass_estimates(
    rewards: Mapping[str, Sequence[float]], *, allow_unequal: bool = False
) -> dict[str, dict[int, Estimate]]:
    """Return `{"pass@k": {k: Estimate}, "pass^k": {k: Estimate}}` for every k from 1 to the
    smallest number of graded samples of a task.

    Raise `UnequalSamplesError` if tasks have different numbers of graded samples, unless
    `allow_unequal` is True. Raise `ValueError` if no task is graded.
    """
    tasks = [list(samples) for samples in rewards.values() if len(samples)]
    if not tasks:
        raise ValueError("no task is graded")
    counts = sorted({len(samples) for samples in tasks})
    if len(counts) > 1 and not allow_unequal:
        few = sum(len(samples) < counts[-1] for samples in tasks)
        raise UnequalSamplesError(
            f"tasks have between {counts[0]} and {counts[-1]} graded samples ({few} of "
            f"{len(tasks)} have fewer than {counts[-1]}): "
            "play the missing ones (the same command, without --tasks, continues the run; with "
            "--allow-unequal, it computes them from the samples that each task has)"
        )
    steps = range(1, counts[0] + 1)
    return {
        "pass@k": {k: mean_over_tasks(_by_task(tasks, k, _any_passes)) for k in steps},
        "pass^k": {k: mean_over_tasks(_by_task(tasks, k, _all_pass)) for k in steps},
    }


def pass_bounds(
    rewards: Mapping[str, Sequence[float]], sizes: Mapping[str, int]
) -> dict[str, dict[int, tuple[float, float]]]:
    """Return `{"pass@k": {k: (low, high)}, "pass^k": {k: (low, high)}}`: the values if all missing
    samples had failed, and if all had passed.

    `rewards[task]` are the graded rewards of a task, and `sizes[task]` is its number of samples,
    including the missing ones. k goes from 1 to the smallest size.
    """
    counts = [
        (size, sum(map(passed, rewards.get(task, ()))), size - len(rewards.get(task, ())))
        for task, size in sizes.items()
    ]
    return {
        name: {
            k: (
                fmean([estimate(n, c, k) for n, c, _ in counts]),
                fmean([estimate(n, c + missing, k) for n, c, missing in counts]),
            )
            for k in range(1, min(sizes.values(), default=0) + 1)
        }
        for name, estimate in (("pass@k", _any_passes), ("pass^k", _all_pass))
    }


def _all_pass(n: int, c: int, k: int) -> float:
    return comb(c, k) / comb(n, k)


def _any_passes(n: int, c: int, k: int) -> float:
    return 1.0 - comb(n - c, k) / comb(n, k)


def _by_task(
    rewards: Sequence[Sequence[float]], k: int, estimate: Callable[[int, int, int], float]
) -> list[float]:
    if not rewards:
        raise ValueError("no task is graded")
    values = []
    for task in rewards:
        if len(task) < k or k < 1:
            raise ValueError(
                f"k = {k} needs at least {k} graded samples of every task, but one task has "
                f"{len(task)}"
            )
        values.append(estimate(len(task), sum(map(passed, task)), k))
    return values
