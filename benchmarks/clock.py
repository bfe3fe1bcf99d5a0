"""Measure the CPU time of short steps: per thread, as medians over rounds, with all variants
interleaved in one run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Laps:
    """Microseconds of CPU of named steps, one list of repetitions for each."""

    times: dict[object, list[float]] = field(default_factory=dict)

    @contextmanager
    def lap(self, name: object) -> Iterator[None]:
        """Time the body as one repetition of `name`."""
        began = time.thread_time_ns()
        yield
        self.times.setdefault(name, []).append((time.thread_time_ns() - began) / 1000)

    def add(self, name: object, microseconds: float) -> None:
        """Add one repetition that was timed elsewhere."""
        self.times.setdefault(name, []).append(microseconds)

    def median(self, name: object) -> float:
        """Return the median of the repetitions of `name`."""
        return statistics.median(self.times[name])


def cpu_of(step: Callable[[], object], *, repeat: int = 50, rounds: int = 7) -> float:
    """Return the microseconds of CPU of `step`: the median over `rounds` of means over `repeat`."""
    return cpu_in_turns(step, repeat=repeat, rounds=rounds)[0]


def cpu_in_turns(*steps: Callable[[], object], repeat: int = 50, rounds: int = 7) -> list[float]:
    """Return `cpu_of` each of `steps`, with all of them in every round, for ratios: the speed of a
    machine changes over time.
    """
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, times in zip(steps, found, strict=True):
            gc.collect()
            began = time.thread_time_ns()
            for _ in range(repeat):
                step()
            times.append((time.thread_time_ns() - began) / 1000 / repeat)
    return [statistics.median(times) for times in found]


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean."""
    return statistics.fmean(list(values))
