"""The throughput of the loop compared with the bound that latencies set: an engine takes 0.5 s, a
user 0.3 s.

Measures the share of that bound, and the delay of the event loop, with 256 and 1,024 episodes. The
load is stationary: the first episodes start one after another over the duration of an episode, and
each one that ends is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks import tight
from benchmarks.clock import HELPERS, cpu
from benchmarks.conversations import tokenizer, workload
from benchmarks.loop import OURS, PARAMS, TIGHT, UNVERIFIED, measured, ours, served_model
from benchmarks.stub import STEP, stub
from benchmarks.tables import Required, Table, number
from benchmarks.world import TURNS, RecordedFactory, RecordedWorld, material, replies
from toolroll.agents.tool_calling import make_agent
from toolroll.evaluation.ray_runner import RayRunner
from toolroll.rollout.environment import Action, EnvironmentOptions, StepResult, Task
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.template.verifier_pool import POOL

ENGINE, USER = 0.5, 0.3
EPISODE = 14.0
"""Approximate duration of an episode in seconds, and of the warm-up."""
SAMPLES = 100  # more than can be played: the run is cancelled at the end of the window
LOADS = (
    (256, TIGHT, 1),
    (256, OURS, 1),
    (256, UNVERIFIED, 1),
    (1024, TIGHT, 1),
    (1024, OURS, 1),
    (1024, UNVERIFIED, 1),
    (1024, OURS, 2),
    (1024, UNVERIFIED, 2),
)
"""(episodes, loop, processes)."""


@dataclass
class Record:
    """The measurements of one process, by the machine's monotonic clock: the time of each turn and
    True if the user was next; the delays of the event loop in seconds; the CPU time until then in
    seconds.
    """

    turns: list[tuple[float, bool]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    used: list[tuple[float, float]] = field(default_factory=list)

    async def watch(self, clock: Callable[[], float] = cpu, *, every: float = 0.005) -> None:
        """Record gaps, and CPU about once a second, until cancelled."""
        due = 0.0
        while True:
            began = time.monotonic()
            await asyncio.sleep(every)
            self.gaps.append((began, time.monotonic() - began - every))
            if began >= due:
                self.used.append((time.monotonic(), clock()))
                due = began + 1


class RecordingFactory(RecordedFactory):
    """A factory whose environments record their steps. The first step creates the file `mark`."""

    def __init__(self, given: Any, record: Record, mark: Path, episodes: int) -> None:
        super().__init__(given, user_seconds=USER, episodes=episodes, spread_seconds=EPISODE)
        self._record, self._mark = record, mark

    def make(self, options: EnvironmentOptions) -> RecordedWorld:
        """Return a new environment."""
        made = super().make(options)
        step, turns = made.step, self._record.turns

        async def noted(action: Action) -> StepResult:
            if not turns:
                self._mark.touch()
            turns.append((time.monotonic(), not action.tool_calls))
            return await step(action)

        made.step = noted  # type: ignore[method-assign]
        return made


async def opened(
    share: int, stack: AsyncExitStack, *, url: str, folder: Path, verify: str, stub_pid: int
) -> tuple[Runner, Sequence[Task]]:
    """Return the runner and tasks of one process. `stack` writes its record to `folder`."""
    HELPERS.add(stub_pid)
    factory, tok = recording(share, stack, folder)
    served = await stack.enter_async_context(served_model(url, tok))
    if verify != "off":  # the start of the verifier's process would be part of the window
        nothing = ServedSequence(np.zeros(0, np.int32), (), [], [])
        for _ in range(POOL.after):
            await POOL.check(served.template.verifier, nothing)
        await asyncio.to_thread(POOL.ready.wait, 60)
    agent = lambda: make_agent(served, {"verify": verify, "parallel_calls": "first"})
    settings = RunSettings(
        sampling_params=PARAMS, concurrency=share, max_turns=TURNS, samples=SAMPLES
    )
    return Runner(factory, agent, settings), factory.tasks("test")


def recording(share: int, stack: AsyncExitStack, folder: Path) -> tuple[RecordingFactory, Any]:
    """Return a factory and a tokenizer; `stack` writes the factory's record to `folder`."""
    tok = tokenizer()
    record, name = Record(), folder / str(os.getpid())
    stack.callback(lambda: name.with_suffix(".json").write_bytes(orjson.dumps(record)))
    watching = asyncio.create_task(record.watch())
    stack.callback(watching.cancel)
    given = material(workload())
    return RecordingFactory(given, record, name.with_suffix(".mark"), share), tok


async def play(url: str, episodes: int, loop: str, processes: int, seconds: float) -> list[Record]:
    """Play for a while, and return the record of each process. The record of this process is last;
    if there are other processes, it only receives episodes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = Record()
        async with AsyncExitStack() as stack:
            verify = "off" if loop == UNVERIFIED else "sample"
            open_ = partial(
                opened, url=url, folder=folder, verify=verify, stub_pid=next(iter(HELPERS))
            )
            stack.enter_context(paced_garbage())
            if loop == TIGHT:
                factory, tok = recording(episodes, stack, folder)
                tasks = itertools.cycle(factory.tasks("test"))
                playing = tight.run(url, tok, factory, tasks, episodes)
            elif processes == 1:
                runner, some = await open_(episodes, stack)
                playing = runner.run(some, lambda episode: None)
            else:
                some = RecordedFactory(None).tasks("test")  # type: ignore[arg-type]
                pool = RayRunner(open_, processes=processes, concurrency=episodes, samples=SAMPLES)
                playing = pool.run(some, lambda episode: None)
            watching = asyncio.create_task(driver.watch(time.process_time, every=0.05))
            running = asyncio.ensure_future(playing)
            # other processes start, so there is no event to wait for
            while not running.done() and _begun(folder) < processes:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.wait([running], timeout=EPISODE + seconds + 0.5)
            if running.done():
                raise RuntimeError("the run has ended too soon") from running.exception()
            for task in (running, watching):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                    await task
        return [*_records(folder), driver] if processes > 1 else _records(folder)


def _begun(folder: Path) -> int:
    return len(list(folder.glob("*.mark")))


def _records(folder: Path) -> list[Record]:
    return [Record(**orjson.loads(file.read_bytes())) for file in folder.glob("*.json")]


@dataclass
class Seen:
    """The measurements within a window: turns per second, share of the bound, gaps in ms, CPU in
    microseconds per turn.
    """

    rate: float
    share: float
    gap: float
    largest: float
    cpu: float


def seen(records: Sequence[Record], episodes: int, seconds: float) -> Seen:
    """Return the measurements from `EPISODE` seconds after the first turn of the last process."""
    begin = max(record.turns[0][0] for record in records if record.turns) + EPISODE
    end = begin + seconds
    users = [user for record in records for when, user in record.turns if begin <= when < end]
    rate = len(users) / seconds
    bound = episodes / (ENGINE + USER * sum(users) / max(1, len(users)))
    gaps = sorted(
        gap * 1000
        for record in records
        if record.turns
        for when, gap in record.gaps
        if begin <= when < end
    )
    used = sum(_cpu_share(record, begin, end) for record in records)
    return Seen(rate, rate / bound, gaps[int(len(gaps) * 0.99)], gaps[-1], used / rate * 1e6)


def _cpu_share(record: Record, begin: float, end: float) -> float:
    """Return the CPU seconds per second in the window."""
    points = [point for point in record.used if begin <= point[0] < end]
    return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    tok, talks = tokenizer(), workload()
    given = material(talks)
    seconds = 4.0 if quick else 10.0
    head = "episodes,loop,processes,turns/s,share of the bound,loop gap p99 in ms,largest in ms"
    head += ",us of CPU per turn"
    made = Table("Engine 0.5 s, user 0.3 s: share of what the latencies allow", head.split(","))
    with stub(replies(talks, tok)) as url:
        asyncio.run(measured(ours, url, tok, given, 16))
    HELPERS.clear()
    found: dict[tuple[int, str, int], Seen] = {}
    with stub(replies(talks, tok), latency=ENGINE) as url:
        for load_of in LOADS[1:2] + LOADS[6:7] if quick else LOADS:
            records = asyncio.run(play(url, *load_of, seconds))
            found[load_of] = seen(records, load_of[0], seconds)
            made.rows.append(row(load_of, found[load_of]))
    for (episodes, loop, processes), measurement in found.items():
        if loop != UNVERIFIED:
            key = f"throughput.{loop.split()[0]}_{episodes}_{processes}"
            made.figures[key] = 100 * measurement.share
            made.figures[f"{key}_gap"] = measurement.gap
        if loop == OURS and (episodes, processes) != (1024, 1):
            text = f"share of the bound, {episodes:,} episodes, processes: {processes}"
            limit = 0.9 if episodes == 256 else 0.7
            made.required.append(Required(text, measurement.share, limit, least=True))
    made.notes.append(
        f"Measured for {seconds:g} s after {EPISODE:g} s of warm-up. The stub answers in steps of "
        f"{STEP * 1000:g} ms, on the same cores as the loop."
    )
    return made


def row(load_of: tuple[int, str, int], found: Seen) -> list[str]:
    """Return the cells of one load."""
    episodes, loop, processes = load_of
    cells = [number(found.rate), number(found.share), number(found.gap), number(found.largest)]
    return [f"{episodes:,}", loop, str(processes), *cells, number(found.cpu)]
