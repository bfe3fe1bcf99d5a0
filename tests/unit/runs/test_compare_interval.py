"""The interval of `toolroll compare`: how often it holds the true difference, how often it sees one
that is not there, and whether its power is the stated one.

In the simulated pairs of benchmarks, a task has a pass rate of its own, and the second model
changes it by an amount of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from toolroll.evaluation.compare.difference import Difference

Array = npt.NDArray[np.float64]
Interval = Callable[[Array, np.random.Generator], tuple[float, float]]
_TASKS = 20_000
_RESAMPLES = 1000


@dataclass(frozen=True)
class Population:
    """The pass rates of all tasks with two models. Their means differ by exactly `difference`."""

    before: Array
    after: Array
    difference: float

    @classmethod
    def of(cls, mean: float, difference: float, seed: int = 5) -> Population:
        rng = np.random.default_rng(seed)
        before = rng.beta(2 * mean, 2 * (1 - mean), _TASKS).clip(1e-4, 1 - 1e-4)
        logits = np.log(before / (1 - before)) + 0.5 * rng.standard_normal(_TASKS)
        low, high = -10.0, 10.0
        for _ in range(60):
            middle = (low + high) / 2
            gained = (1 / (1 + np.exp(-logits - middle)) - before).mean()
            low, high = (middle, high) if gained < difference else (low, middle)
        after = 1 / (1 + np.exp(-logits - low))
        return cls(before, after, float((after - before).mean()))

    def play(self, tasks: int, samples: int, rng: np.random.Generator) -> Array:
        """The changes of the mean rewards of `tasks` tasks with `samples` samples each."""
        chosen = rng.integers(0, _TASKS, tasks)
        passes = [rng.binomial(samples, rates[chosen]) for rates in (self.before, self.after)]
        changes: Array = (passes[1] - passes[0]) / samples
        return changes


@dataclass(frozen=True)
class Rates:
    """Shares of the simulated pairs: whose interval contains the difference, whose interval does
    not contain 0, and the mean of the stated powers.
    """

    covered: float
    seen: float
    power: float


def rates(
    population: Population,
    tasks: int,
    samples: int,
    pairs: int,
    interval: Interval | None = None,
    seed: int = 11,
) -> Rates:
    """Play `pairs` pairs of benchmarks. `interval`: by default that of `Difference`."""
    rng = np.random.default_rng(seed)
    covered, seen, powers = 0, 0, []
    for _ in range(pairs):
        changes = population.play(tasks, samples, rng)
        difference = Difference.of([(0.0, change) for change in changes.tolist()])
        low, high = difference.interval() if interval is None else interval(changes, rng)
        covered += low <= population.difference <= high
        seen += not low <= 0 <= high
        powers.append(difference.power(population.difference))
    return Rates(covered / pairs, seen / pairs, float(np.mean(powers)))


def percentile(changes: Array, rng: np.random.Generator) -> tuple[float, float]:
    """The percentile bootstrap over tasks."""
    means = changes[rng.integers(0, len(changes), (_RESAMPLES, len(changes)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def agresti_min(changes: Array, rng: np.random.Generator) -> tuple[float, float]:
    """Agresti and Min's interval for matched pairs, with a task as a pair."""
    count = len(changes) + 2
    mean = changes.sum() / count
    width = 1.96 * np.sqrt(((changes**2).sum() + 1) / count - mean**2) / np.sqrt(count)
    return float(mean - width), float(mean + width)


PAIRS = 800


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("difference", [0.0, 0.03, 0.1])
def test_it_covers_and_sees_as_often_as_it_says(samples: int, difference: float) -> None:
    found = rates(Population.of(0.5, difference), 100, samples, PAIRS)
    assert 0.93 <= found.covered <= 0.97
    if difference:
        assert found.seen == pytest.approx(found.power, abs=0.03)
    else:
        assert found.seen <= 0.06  # 0.05, and what chance adds to it


@pytest.mark.parametrize("samples", [1, 4])
def test_it_holds_where_almost_every_task_passes(samples: int) -> None:
    population = Population.of(0.97, 0.02)
    assert rates(population, 33, samples, 200).covered >= 0.95
    assert rates(population, 33, samples, 200, percentile).covered < 0.92


def test_samples_of_one_task_are_not_taken_for_tasks() -> None:
    """With 4 samples a task, an interval for pairs of samples sees nothing."""
    population = Population.of(0.2, 0.1)
    ours, pairs = (rates(population, 33, 4, 200, each).seen for each in (None, agresti_min))
    assert ours > pairs + 0.1
