"""What live episodes hold: bytes a token, and the cost of a full garbage collection."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.tables import Table, number
from toolroll.rollout.session import Session
from toolroll.rollout.types import Completion, WeightVersion

TURNS = 20
TOKENS = 12_000
_PROMPT = 4_000


def episode(seed: int, *, turns: int = TURNS, tokens: int = TOKENS) -> Session:
    """A live session of that many tokens: a prompt of 4,000, and turns that share the rest between sampled and observed ones."""
    rng = np.random.default_rng(seed)
    made = Session(f"s{seed}")
    made.observe(rng.integers(0, 150_000, _PROMPT).astype(np.int32))
    each = (tokens - _PROMPT) // (2 * turns)
    params = {"temperature": 1.0, "max_new_tokens": 512}
    for _ in range(turns):
        ids = rng.integers(0, 150_000, each).astype(np.int32)
        logprobs = -rng.random(each).astype(np.float32)
        made.sample(Completion(ids, logprobs, "stop", 151645, "word " * each, (WeightVersion("default", 0, each),)), params)
        made.observe(rng.integers(0, 150_000, each).astype(np.int32))
    return made


def held(turns: int, *, episodes: int = 16, tokens: int = TOKENS) -> float:
    """Bytes a token that live sessions hold, as Python's allocators count them."""
    episode(0, turns=turns, tokens=tokens)
    gc.collect()
    tracemalloc.start()
    kept = [episode(seed, turns=turns, tokens=tokens) for seed in range(episodes)]
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / sum(len(session) for session in kept)


def as_lists(seed: int) -> tuple[list[int], list[float], list[int]]:
    """The tokens of an episode as lists of ids, logprobs and mask."""
    made = episode(seed).trajectories()[0]
    return made.input_ids.tolist(), made.logprobs.tolist(), made.loss_mask.tolist()


def collection(episodes: int, make: Callable[[int], object] = episode) -> float:
    """Milliseconds of a full collection that so many live episodes add."""

    def full() -> float:
        found = []
        for _ in range(5):
            began = time.thread_time()
            gc.collect()
            found.append((time.thread_time() - began) * 1000)
        return min(found)

    before = full()
    kept = [make(seed) for seed in range(episodes)]
    after = full()
    del kept
    return after - before


_RESIDENT = """
from benchmarks.memory import episode, rss
before = rss()
kept = [episode(seed % 64) for seed in range({episodes})]
print(rss() - before)
"""


def rss() -> float:
    """MiB that this process holds in memory now (Linux; elsewhere its peak)."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def resident(episodes: int) -> float:
    """MiB by which a fresh process grows with that many live sessions."""
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT.format(episodes=episodes)], capture_output=True, text=True, check=True, timeout=600
    )
    return float(done.stdout.split()[-1])


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    episodes = 512 if quick else 4096
    made = Table("Memory of live episodes (12,000 tokens, 20 turns)", ["", "toolroll"])
    few, many = held(10), held(40)
    made.rows.append(["bytes a token, 10 turns", number(few)])
    made.rows.append(["bytes a token, 20 turns", number(held(TURNS))])
    made.rows.append(["bytes a token, 40 turns, the same tokens", number(many)])
    grown = resident(episodes) * 4096 / episodes
    made.rows.append([f"MiB of 4,096 live episodes{' (from 512)' if quick else ''}", number(grown)])
    paused, lists = collection(1024), collection(256, as_lists) * 4
    made.rows.append(["ms of a full collection for 1,024 live episodes", number(max(paused, 0.0))])
    made.rows.append(["the same in Python lists (from 256)", number(lists)])
    made.notes += [f"Peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB."]
    return made
