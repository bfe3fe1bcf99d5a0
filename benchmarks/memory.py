"""The memory of whole live episodes, with messages and tools, and the time of a full collection of
Python's garbage with all of them alive: toolroll beside the tight loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

from benchmarks import tight
from benchmarks.clock import in_new_process
from benchmarks.conversations import tokenizer, workload
from benchmarks.endpoint import resident
from benchmarks.loop import OURS, PARAMS, TIGHT, served_model
from benchmarks.stub import stub
from benchmarks.tables import Table, number
from benchmarks.world import TURNS, Material, RecordedFactory, RecordedWorld, material, replies
from toolroll.agents.tool_calling import make_agent
from toolroll.rollout.engine import Engine
from toolroll.rollout.engine.stream import Progress
from toolroll.rollout.environment import Action, EnvironmentOptions, StepResult
from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Completion, GenerateRequest

COLLECTIONS = 9


class CountingEngine(Engine):
    """Keeps the length of each session: its last prompt and answer."""

    lengths: dict[str, int]

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Generate, and record the length."""
        completion = await super().generate(request, progress=progress)
        self.lengths[request.session_id] = len(request.input_ids) + len(completion.output_ids)
        return completion


class HeldFactory(RecordedFactory):
    """Environments that wait in their last step, so that all episodes are alive at once."""

    def __init__(self, given: Material, episodes: int) -> None:
        super().__init__(given)
        self._missing = episodes
        self.all_wait = asyncio.Event()

    def make(self, options: EnvironmentOptions) -> RecordedWorld:
        """Return a new environment."""
        made = super().make(options)
        step, left = made.step, TURNS

        async def held(action: Action) -> StepResult:
            nonlocal left
            left -= 1
            if not left:
                self._missing -= 1
                if not self._missing:
                    self.all_wait.set()
                await asyncio.Event().wait()
            return await step(action)

        made.step = held  # type: ignore[method-assign]
        return made


@dataclass
class Held:
    """The bytes, the tokens and the CPU milliseconds of full collections of live episodes, and of
    collections before the first of them.
    """

    used: int
    tokens: int
    collections: list[float]
    empty: list[float]


def measure(url: str, loop: str, episodes: int, traced: bool) -> Held:  # noqa: FBT001
    """Play `episodes` up to their last step in this process. `traced`: count what Python's
    allocators hold, else the growth of the resident process.
    """
    tok = tokenizer()
    given = material(workload())
    hold = hold_ours if loop == OURS else hold_tight
    asyncio.run(hold(url, tok, given, 4, traced))  # imports and caches
    return asyncio.run(hold(url, tok, given, episodes, traced))


async def hold_ours(url: str, tok: Any, given: Material, episodes: int, traced: bool) -> Held:  # noqa: FBT001
    """Hold toolroll's episodes."""
    factory, ended = HeldFactory(given, episodes), list[Episode]()
    async with served_model(url, tok, CountingEngine) as served:
        lengths = served.engine.lengths = dict[str, int]()  # type: ignore[attr-defined]
        settings = RunSettings(sampling_params=PARAMS, concurrency=episodes, max_turns=4 * TURNS)
        agent = lambda: make_agent(served, {"parallel_calls": "first"})
        playing = Runner(factory, agent, settings).run(
            factory.tasks("test")[:episodes], ended.append
        )
        held = await held_while(playing, factory, traced=traced)
    held.tokens = sum(lengths.values())
    return held


async def hold_tight(url: str, tok: Any, given: Material, episodes: int, traced: bool) -> Held:  # noqa: FBT001
    """Hold the tight loop's episodes."""
    factory, lives = HeldFactory(given, episodes), list[tight.Episode]()
    tasks = factory.tasks("test")[:episodes]
    playing = tight.run(url, tok, factory, tasks, episodes, lives.append)
    held = await held_while(playing, factory, traced=traced)
    held.tokens = sum(len(episode.ids) for episode in lives)
    return held


async def held_while(playing: Any, factory: HeldFactory, *, traced: bool) -> Held:
    """Run `playing` until all episodes wait, measure, and cancel it."""
    empty = collections()
    before = resident()
    if traced:
        tracemalloc.start()
    running = asyncio.ensure_future(playing)
    waiting = asyncio.ensure_future(factory.all_wait.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        raise RuntimeError("the run has ended") from running.exception()
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] if traced else resident() - before
    tracemalloc.stop()
    alive = collections()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
        await running
    return Held(used, 0, alive, empty)


def collections() -> list[float]:
    """Return the milliseconds of CPU of full collections."""
    times = []
    for _ in range(COLLECTIONS):
        began = time.thread_time()
        gc.collect()
        times.append(1000 * (time.thread_time() - began))
    return times


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    few, many = (64, 256) if quick else (256, 1024)
    tok, talks = tokenizer(), workload()
    made = Table(
        f"Memory of live episodes, with messages and tools, after {TURNS} turns",
        [
            "loop",
            f"bytes per token, {few:,} episodes (Python's allocators)",
            f"bytes per token, {many:,} (resident)",
            f"full collection with {many:,}, ms of CPU",
            "largest",
            "before the first episode",
        ],
    )
    measured: dict[str, list[Held]] = {}
    with stub(replies(talks, tok)) as url:
        for loop in (OURS, TIGHT):
            measured[loop] = [
                in_new_process("benchmarks.memory", "measure", url, loop, count, traced)
                for count, traced in ((few, True), (many, False))
            ]
    grown = next(iter(measured.values()))[1]
    for loop, (traced, grown) in measured.items():
        bytes_per_token = traced.used / traced.tokens
        collection = statistics.median(grown.collections)
        cells = [bytes_per_token, grown.used / grown.tokens, collection, max(grown.collections)]
        made.rows.append([loop, *map(number, [*cells, statistics.median(grown.empty)])])
        key = f"memory.{loop.split()[0]}"
        made.figures |= {key: bytes_per_token, f"{key}_resident": grown.used / grown.tokens}
        made.figures |= {f"{key}_collection": collection}
        made.figures["memory.before"] = statistics.median(grown.empty)
    made.notes += [
        f"Tokens per episode: {grown.tokens / many:,.0f}. Medians of {COLLECTIONS} collections, "
        "with all episodes waiting in their last step. They also visit the packages and the "
        "tokenizer, as before the first episode. toolroll's own runs collect less often.",
    ]
    return made
