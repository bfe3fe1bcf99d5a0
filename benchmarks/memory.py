"""Start-up and memory: the cost of a process before its first episode, and the memory of live
episodes.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conversations import tokenizer, workload
from benchmarks.stub import stub
from benchmarks.tables import Table, number
from benchmarks.world import Material, RecordedFactory, RecordedWorld, material
from toolroll.agents.tool_calling import make_agent
from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.engine.stream import Progress
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import (
    Action,
    Completion,
    EnvironmentOptions,
    Episode,
    GenerateRequest,
    StepResult,
    WeightVersion,
)

TURNS = 20
TOKENS = 12_000
_PROMPT = 4_000


def episode(seed: int, *, turns: int = TURNS, tokens: int = TOKENS) -> SessionPath:
    """Return a live session with `tokens` tokens: a prompt of 4,000, and turns with sampled and
    observed tokens.
    """
    rng = np.random.default_rng(seed)
    made = SessionPath(Session(f"s{seed}"))
    made.observe(rng.integers(0, 150_000, _PROMPT).astype(np.int32))
    each = (tokens - _PROMPT) // (2 * turns)
    params = {"temperature": 1.0, "max_new_tokens": 512}
    for _ in range(turns):
        ids = rng.integers(0, 150_000, each).astype(np.int32)
        logprobs = -rng.random(each).astype(np.float32)
        made.sample(
            Completion(
                ids, logprobs, "stop", 151645, "word " * each, (WeightVersion("default", 0, each),)
            ),
            params,
        )
        made.observe(rng.integers(0, 150_000, each).astype(np.int32))
    return made


def held(turns: int, *, episodes: int = 16, tokens: int = TOKENS) -> float:
    """Return the bytes per token of live sessions, as Python's allocators count them."""
    episode(0, turns=turns, tokens=tokens)
    gc.collect()
    tracemalloc.start()
    kept = [episode(seed, turns=turns, tokens=tokens) for seed in range(episodes)]
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / sum(len(session) for session in kept)


_RESIDENT = """
from benchmarks.memory import episode, rss
before = rss()
kept = [episode(seed % 64) for seed in range({episodes})]
print(rss() - before)
"""


def rss() -> float:
    """Return the MiB of this process in memory now (Linux; elsewhere its peak)."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def resident(episodes: int) -> float:
    """Return the MiB by which a fresh process grows with live sessions."""
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT.format(episodes=episodes)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return float(done.stdout.split()[-1])


class CountingEngine(Engine):
    """Keeps the length of each session: its last prompt and answer."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.lengths: dict[str, int] = {}

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Generate, and record the length."""
        found = await super().generate(request, progress=progress)
        self.lengths[request.session_id] = len(request.input_ids) + len(found.output_ids)
        return found


class HeldFactory(RecordedFactory):
    """Environments that wait in their last step, so that all episodes are alive at once."""

    def __init__(self, given: Material, turns: int) -> None:
        super().__init__(given, turns=turns)
        self.waiting = 0

    def make(self, options: EnvironmentOptions) -> RecordedWorld:
        """Return a new environment."""
        made = super().make(options)
        made.blocking = False
        step, left = made.step, self._turns

        async def held(action: Action) -> StepResult:
            nonlocal left
            left -= 1
            if not left:
                self.waiting += 1
                await asyncio.Event().wait()
            found = step(action)
            assert isinstance(found, StepResult)
            return found

        made.step = held  # type: ignore[method-assign]
        return made


async def live(url: str, given: Material, tok: Any, episodes: int) -> float:
    """Return the bytes per token of whole episodes: messages, environment, agent and session."""
    template = ChatTemplate(tok)
    parser = get_parser("hermes", template.encoder.control)
    engine = CountingEngine(EngineConfig(engine=url, context_length=200_000, vocab_size=len(tok)))
    async with Model(engine, template, parser) as served:
        await _held_bytes(served, engine, given, 4)  # caches and imports
        used = await _held_bytes(served, engine, given, episodes)
    return used / sum(engine.lengths.values())


async def _held_bytes(served: Model, engine: CountingEngine, given: Material, episodes: int) -> int:
    factory, engine.lengths = HeldFactory(given, TURNS), {}
    settings = RunSettings(
        sampling_params={"max_new_tokens": 512}, concurrency=episodes, max_turns=4 * TURNS
    )
    runner = Runner(factory, lambda: make_agent(served, {"parallel_calls": "first"}), settings)
    gc.collect()
    tracemalloc.start()
    ended: list[Episode] = []
    running = asyncio.create_task(runner.run(factory.tasks("test")[:episodes], ended.append))
    while factory.waiting < episodes and not ended and not running.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if ended or running.done():
        raise RuntimeError(f"an episode has ended: {ended[:1]}")
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    running.cancel()
    await asyncio.wait([running])
    return used


_START = """
import time
from benchmarks.memory import rss
import toolroll.agents.tool_calling, toolroll.rollout.model.model
print(rss(), time.process_time())
from benchmarks.conversations import tokenizer
tok = tokenizer()
print(rss(), time.process_time())
from toolroll.rollout.template import ChatTemplate
template = ChatTemplate(tok)
template.prompt([{"role": "user", "content": "Hi"}], [])
print(rss(), time.process_time())
"""


def start() -> list[list[str]]:
    """Return the rows of a fresh process: its memory and CPU after each step of its start."""
    done = subprocess.run(
        [sys.executable, "-c", _START], capture_output=True, text=True, check=True, timeout=600
    )
    steps = (
        "imports",
        "and the tokenizer (151,643 tokens)",
        "and the chat template, certified, with one prompt",
    )
    found = [line.split() for line in done.stdout.splitlines()]
    return [
        [f"start: {step}", f"{number(float(size))} MiB, {number(float(cpu))} s of CPU"]
        for step, (size, cpu) in zip(steps, found, strict=True)
    ]


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    episodes = 512 if quick else 4096
    made = Table("Start, and memory of live episodes (20 turns)", ["", "toolroll"])
    made.rows += start()
    tok = tokenizer()
    given = material(workload(), tok)
    with stub(given.replies) as url:
        whole = asyncio.run(live(url, given, tok, 64 if quick else 256))
    made.rows.append(["bytes per token of whole episodes", number(whole)])
    few, many = held(10), held(40)
    made.rows.append(["bytes per token of sessions alone, 10 turns", number(few)])
    made.rows.append(["bytes per token of sessions alone, 20 turns", number(held(TURNS))])
    made.rows.append(["bytes per token of sessions alone, 40 turns, the same tokens", number(many)])
    grown = resident(episodes) * 4096 / episodes
    made.rows.append([f"MiB of 4,096 live sessions{' (from 512)' if quick else ''}", number(grown)])
    made.notes += [
        f"Peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} "
        f"MiB."
    ]
    return made
