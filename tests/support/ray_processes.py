"""A Ray cluster on this machine, and the processes in it that play episodes."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import living

from toolroll.evaluation.run_config import RunConfig
from toolroll.rollout.runs.registry import find_environment
from toolroll.testing import (
    EmbeddedEngine,
    PolicyRequest,
    load_embedded_tokenizer,
    play_references,
    serve_in_thread,
)


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


@contextlib.contextmanager
def desk_engine(*, samples: int, latency: float) -> Iterator[EmbeddedEngine]:
    """Plays the desk's references by the prompt alone, slow enough for something to happen."""
    desk = find_environment("desk")
    lines = play_references(desk, desk.tasks("test"), samples=samples, mistakes=0.4, seed=9)

    def policy(request: PolicyRequest) -> str:
        said = lines.get(request.routing_key, ["Goodbye."])
        turn = request.text.count("<|turn|>assistant") - 1
        return said[turn] if turn < len(said) else "Goodbye."

    engine = EmbeddedEngine(load_embedded_tokenizer(), policy, latency=latency)
    with serve_in_thread(engine) as served:
        yield served


def desk_run(engine: EmbeddedEngine, out: Path, **more: Any) -> RunConfig:
    """The settings of a run of the desk with `desk_engine`."""
    own: dict[str, Any] = {"env": "desk", "model": "embedded", "parser": "hermes"}
    own |= {"engine": engine.url, "concurrency": 8, "do_nothing": False, "out": out}
    return RunConfig(**{**own, **more})


def workers() -> list[int]:
    """The processes below this one that play episodes, or are started for it."""
    parents = {pid: parent for pid, parent, _ in living()}
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
