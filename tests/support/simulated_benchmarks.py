"""Pairs of simulated benchmarks, to choose and to check the interval of `toolroll compare`.

A task has a pass rate of its own, and the second model changes it by an amount of its own. By hand:
`PYTHONPATH=tests python -m support.simulated_benchmarks 4000` compares four intervals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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


def bootstrap_t(changes: Array, rng: np.random.Generator) -> tuple[float, float]:
    """The studentized bootstrap over tasks."""
    drawn = changes[rng.integers(0, len(changes), (_RESAMPLES, len(changes)))]
    error = changes.std(ddof=1) / np.sqrt(len(changes))
    errors = np.maximum(drawn.std(axis=1, ddof=1) / np.sqrt(len(changes)), 1e-9)
    low, high = np.percentile((drawn.mean(axis=1) - changes.mean()) / errors, [2.5, 97.5])
    return float(changes.mean() - high * error), float(changes.mean() - low * error)


def agresti_min(changes: Array, rng: np.random.Generator) -> tuple[float, float]:
    """Agresti and Min's interval for matched pairs, with a task as a pair."""
    count = len(changes) + 2
    mean = changes.sum() / count
    width = 1.96 * np.sqrt(((changes**2).sum() + 1) / count - mean**2) / np.sqrt(count)
    return float(mean - width), float(mean + width)


INTERVALS: dict[str, Interval | None] = {
    "compare": None,
    "percentile": percentile,
    "bootstrap-t": bootstrap_t,
    "Agresti-Min": agresti_min,
}


def main(arguments: Sequence[str]) -> None:
    """Print a table. The arguments: the number of pairs, and of tasks."""
    pairs = int(arguments[0]) if arguments else 400
    tasks = int(arguments[1]) if len(arguments) > 1 else 100
    names = "".join(f"{name:>14}" for name in INTERVALS)
    sys.stdout.write(f"covered / not 0 (%){names}  stated power\n")
    for mean in (0.5, 0.2, 0.97):
        for samples in (1, 4):
            for difference in (0.0, 0.03, 0.1) if mean < 0.9 else (0.0, 0.02):
                population = Population.of(mean, difference)
                found = [rates(population, tasks, samples, pairs, i) for i in INTERVALS.values()]
                cells = "".join(f"{100 * r.covered:8.1f} {100 * r.seen:5.1f}" for r in found)
                label = f"{mean:.2f} x{samples} {difference:+.2f}"
                sys.stdout.write(f"{label:19}{cells}{100 * found[0].power:14.1f}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
