"""CPU time of short steps: per thread, medians over rounds, all ways interleaved in one run."""

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
        """One repetition, timed elsewhere."""
        self.times.setdefault(name, []).append(microseconds)

    def median(self, name: object) -> float:
        """The median of its repetitions."""
        return statistics.median(self.times[name])


def cpu_of(step: Callable[[], object], *, repeat: int = 50, rounds: int = 7) -> float:
    """Microseconds of CPU of one `step`: the median over `rounds` of the mean over `repeat`."""
    return cpu_in_turns(step, repeat=repeat, rounds=rounds)[0]


def cpu_in_turns(*steps: Callable[[], object], repeat: int = 50, rounds: int = 7) -> list[float]:
    """That of each of `steps`, all of them in every round: for ratios, as a machine's speed
    changes from one moment to the next.
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
    """The arithmetic mean."""
    return statistics.fmean(list(values))
