"""A Ray cluster on this machine, and the processes in it that play episodes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def local_cluster() -> Iterator[None]:
    """A cluster whose processes can import the tests."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # nothing is asked of the network
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def workers() -> list[int]:
    """The processes below this one that play episodes, or are started for it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    below, last = {os.getpid()}, set[int]()
    while below != last:
        last = set(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    found = []
    for pid in below:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_Worker"):
                found.append(pid)
    return found
