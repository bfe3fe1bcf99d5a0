"""Measure CPU time: of short steps by thread, and of a process with all processes below it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HELPERS: set[int] = set()
"""Process ids of engine stubs and clients, whose CPU time is not counted."""


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

    def median(self, name: object) -> float:
        """Return the median of the repetitions of `name`."""
        return statistics.median(self.times[name])


def cpu() -> float:
    """Return the CPU seconds of this process and of all processes below it, running or ended,
    without `HELPERS`. Only differences are meaningful. Other systems than Linux count children
    when they end.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + _running_below(os.getpid())


def _running_below(root: int) -> float:
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(stat[1])
        ticks[int(folder.name)] = sum(map(int, stat[11:15]))  # own time, and of ended children
    below = (pid for pid in ticks if pid != root and _is_below(pid, root, parents))
    return sum(ticks[pid] for pid in below) / os.sysconf("SC_CLK_TCK")


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid and pid != root and pid not in HELPERS:
        pid = parents.get(pid, 0)
    return pid == root


def in_new_process(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return what the function `name` of `module` returns in a new process, without memory of what
    ran here.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_called, module, name, args, kwargs).result()


def _called(module: str, name: str, args: Any, kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)
