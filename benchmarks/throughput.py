"""How near the loop comes to what latencies allow: an engine that takes 0.5 s, a user who takes 0.3 s, async or blocking.

Goals: with an async user at least 0.98 of the bound at 256 episodes and 0.95 at 1,024, with a blocking one 0.98 and 0.90; the event
loop's gap at 256 episodes p99 below 15 ms and never above 50, at 1,024 below 75 and 250.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.conversations import tokenizer, workload
from benchmarks.loop import PARAMS, measured, ours, served_model
from benchmarks.stub import stub
from benchmarks.tables import Table, number, verdict
from benchmarks.world import Material, RecordedFactory, RecordedWorld, material
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.garbage import paced_garbage
from toolroll.rollout.runner import Runner, RunSettings
from toolroll.rollout.types import Action, EnvironmentOptions, StepResult

ENGINE, USER = 0.5, 0.3
WARM_UP = 3.0
GOALS = {(256, False): (0.98, 15, 50), (1024, False): (0.95, 75, 250), (256, True): (0.98, 15, 50), (1024, True): (0.90, 75, 250)}
"""(episodes, blocking) -> share of the bound, p99 and largest gap in ms."""


@dataclass
class Window:
    """What is counted while the window is open. Gaps in seconds."""

    open: bool = False
    turns: int = 0
    users: int = 0
    gaps: list[float] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.gaps = []


class CountedFactory(RecordedFactory):
    """Counts the steps of all its environments."""

    def __init__(self, given: Material, window: Window, *, blocking: bool) -> None:
        super().__init__(given, turns=20, user_seconds=USER, blocking=blocking)
        self._window = window

    def make(self, options: EnvironmentOptions) -> RecordedWorld:
        """A fresh one."""
        window, made = self._window, super().make(options)
        step = made.step

        def counted(action: Action) -> Any:
            if window.open:
                window.turns += 1
                window.users += not action.tool_calls
            return step(action)

        async def counted_async(action: Action) -> StepResult:
            found = counted(action)
            return found if isinstance(found, StepResult) else await found

        made.step = counted if made.blocking else counted_async  # type: ignore[method-assign]
        return made


async def watch(window: Window) -> None:
    """Measure how late the event loop comes back."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.002)
        if window.open:
            window.gaps.append(time.perf_counter() - began - 0.002)


async def play(url: str, tok: Any, given: Material, episodes: int, seconds: float, *, blocking: bool) -> tuple[Window, float]:
    """Play for a while; what was counted in the window, and the client's CPU in it, in seconds."""
    window = Window()
    factory = CountedFactory(given, window, blocking=blocking)
    async with served_model(url, tok, threads=episodes if blocking else 8) as served, paced_garbage():
        settings = RunSettings(PARAMS, concurrency=episodes, max_num_steps=20, samples=100)
        agent = lambda: TrainableToolCallingAgent(given.tools, "", served=served)
        run = asyncio.create_task(Runner(factory, agent, settings).run(factory.tasks("test"), lambda episode: None))
        watching = asyncio.create_task(watch(window))
        await asyncio.sleep(WARM_UP)
        window.open, cpu = True, time.process_time()
        await asyncio.sleep(seconds)
        window.open, cpu = False, time.process_time() - cpu
        for task in (run, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                await task
    return window, cpu


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    tok, load = tokenizer(), workload()
    given = material(load, tok)
    seconds = 6.0 if quick else 12.0
    made = Table(
        "Engine 0.5 s, user 0.3 s: share of what the latencies allow",
        ["episodes", "user", "turns/s", "share of the bound", "loop gap p99, ms", "largest, ms", "us of CPU a turn"],
    )
    with stub(given.replies) as url:
        asyncio.run(measured(ours, url, tok, given, 64))
    with stub(given.replies, latency=ENGINE) as url:
        for (episodes, blocking), (share, p99, most) in GOALS.items():
            window, cpu = asyncio.run(play(url, tok, given, episodes, seconds, blocking=blocking))
            bound = episodes / (ENGINE + USER * window.users / max(window.turns, 1))
            reached = window.turns / seconds / bound
            gaps = sorted(window.gaps)
            tail, largest = gaps[int(len(gaps) * 0.99)] * 1000, gaps[-1] * 1000
            kind = "blocking" if blocking else "async"
            rate = number(window.turns / seconds)
            cost = number(cpu / max(window.turns, 1) * 1e6)
            made.rows.append([f"{episodes:,}", kind, rate, f"{reached:.3f}", f"{tail:.1f}", f"{largest:.0f}", cost])
            made.notes.append(
                f"Goal, {episodes:,} episodes, {kind} user: share at least {share}: {verdict(held=reached >= share)}; gap p99 below "
                f"{p99} ms: {verdict(held=tail < p99)}; largest below {most} ms: {verdict(held=largest < most)}."
            )
    made.notes.append("The garbage collector paced as in `toolroll run` (`rollout/garbage.py`).")
    made.notes.append(f"Load average of the machine at the end: {os.getloadavg()[0]:.1f}; a gap is the machine's as much as ours.")
    return made
