"""The throughput of the loop compared with the bound that latencies set: an engine takes 0.5 s, a
user 0.3 s.

Measures the share of that bound, and the delay of the event loop, with 256 and 1,024 episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from benchmarks.conversations import tokenizer, workload
from benchmarks.loop import PARAMS, measured, ours, served_model
from benchmarks.stub import STEP, stub
from benchmarks.tables import Table, number
from benchmarks.world import RecordedFactory, RecordedWorld, material
from toolroll.agents.tool_calling import make_agent
from toolroll.rollout.runs.processes import ProcessRunner
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Action, EnvironmentOptions, StepResult, Task

ENGINE, USER = 0.5, 0.3
TURNS = 20
EPISODE = 14.0
"""Approximate duration of an episode in seconds. It is also the length of the warm-up, after which
conversations of every length are running.
"""
SAMPLES = 100  # more than can be played: the run is cancelled at the end of the window
LOADS = (
    (256, False, 1),
    (1024, False, 1),
    (1024, False, 2),
    (256, True, 1),
    (1024, True, 1),
    (1024, True, 2),
)
"""(episodes, blocking user, processes)."""


@dataclass
class Record:
    """The measurements of one process, by the machine's monotonic clock: the time of each turn and
    True if the user was next; the delays of the event loop in seconds; the process's CPU time until
    then in seconds.
    """

    turns: list[tuple[float, bool]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)

    async def watch(self, *, every: float = 0.005) -> None:
        """Record gaps and CPU until cancelled."""
        for turn in itertools.count():
            began = time.monotonic()
            await asyncio.sleep(every)
            self.gaps.append((began, time.monotonic() - began - every))
            if turn % 10 == 0:
                self.cpu.append((time.monotonic(), time.process_time()))


class RecordingFactory(RecordedFactory):
    """A factory whose environments record their steps in `record`; the first step creates `mark`.

    The first `staggered` episodes end after different numbers of turns, so that afterwards episodes
    start and end at all times, like in a long run.
    """

    def __init__(
        self, given: Any, record: Record, mark: Path, *, blocking: bool, staggered: int
    ) -> None:
        super().__init__(given, turns=TURNS, user_seconds=USER, blocking=blocking)
        self._record, self._mark = record, mark
        self._firsts = iter([1 + at % TURNS for at in range(staggered)])

    def make(self, options: EnvironmentOptions) -> RecordedWorld:
        """Return a new environment."""
        self._turns = next(self._firsts, TURNS)
        made = super().make(options)
        step, turns = made.step, self._record.turns

        def noted(action: Action) -> Any:
            if not turns:
                self._mark.touch()
            turns.append((time.monotonic(), not action.tool_calls))
            return step(action)

        async def noted_async(action: Action) -> StepResult:
            found = noted(action)
            return found if isinstance(found, StepResult) else await found

        made.step = noted if made.blocking else noted_async  # type: ignore[method-assign]
        return made


async def opened(
    share: int, stack: AsyncExitStack, *, url: str, folder: Path, blocking: bool
) -> tuple[Runner, Sequence[Task]]:
    """Return the runner and tasks of one process. `stack` writes its record to `folder`."""
    tok = tokenizer()
    given = material(workload(), tok)
    record, name = Record(), folder / str(os.getpid())
    stack.callback(lambda: name.with_suffix(".json").write_bytes(orjson.dumps(record)))
    watching = asyncio.create_task(record.watch())
    stack.callback(watching.cancel)
    served = await stack.enter_async_context(
        served_model(url, tok, threads=share if blocking else 8)
    )
    factory = RecordingFactory(
        given, record, name.with_suffix(".mark"), blocking=blocking, staggered=share
    )
    agent = lambda: make_agent(served, {"parallel_calls": "first"})
    return Runner(
        factory,
        agent,
        RunSettings(sampling_params=PARAMS, concurrency=share, max_turns=TURNS, samples=SAMPLES),
    ), factory.tasks("test")


async def play(
    url: str, episodes: int, seconds: float, *, blocking: bool, processes: int
) -> list[Record]:
    """Play for a while, and return the record of each process. The record of this process is last;
    if there are other processes, it only receives episodes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = Record()
        async with AsyncExitStack() as stack:
            open_ = partial(opened, url=url, folder=folder, blocking=blocking)
            runner: Runner | ProcessRunner
            if processes == 1:
                runner, tasks = await open_(episodes, stack)
            else:
                tasks = RecordedFactory(None, turns=TURNS).tasks("test")  # type: ignore[arg-type]
                runner = ProcessRunner(
                    open_, processes=processes, concurrency=episodes, samples=SAMPLES
                )
            stack.enter_context(paced_garbage())
            watching = asyncio.create_task(driver.watch(every=0.05))
            running = asyncio.create_task(runner.run(tasks, lambda episode: None))
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
    """The measurements within a window: turns, turns before the user, sorted gaps in ms, CPU in
    seconds.
    """

    turns: int
    users: int
    gaps: list[float]
    cpu: float


def seen(records: Sequence[Record], seconds: float) -> Seen:
    """Return the measurements from `EPISODE` seconds after the first turn of the last process."""
    begin = max(record.turns[0][0] for record in records if record.turns) + EPISODE
    end = begin + seconds
    turns = [user for record in records for at, user in record.turns if begin <= at < end]
    gaps = sorted(
        gap * 1000
        for record in records
        if record.turns
        for at, gap in record.gaps
        if begin <= at < end
    )
    cpu = [[value for at, value in record.cpu if begin <= at < end] for record in records]
    return Seen(len(turns), sum(turns), gaps, sum(values[-1] - values[0] for values in cpu))


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    tok, load = tokenizer(), workload()
    given = material(load, tok)
    seconds = 6.0 if quick else EPISODE
    made = Table(
        "Engine 0.5 s, user 0.3 s: share of what the latencies allow",
        [
            "episodes",
            "user",
            "processes",
            "turns/s",
            "share of the bound",
            "loop gap p99, ms",
            "largest, ms",
            "us of CPU per turn",
        ],
    )
    with stub(given.replies) as url:
        asyncio.run(measured(ours, url, tok, given, 64))
    with stub(given.replies, latency=ENGINE) as url:
        for episodes, blocking, processes in LOADS:
            found = seen(
                asyncio.run(play(url, episodes, seconds, blocking=blocking, processes=processes)),
                seconds,
            )
            made.rows.append(row(found, seconds, (episodes, blocking, processes)))
    made.notes.append(
        f"Steady state, measured for {seconds:g} s after {EPISODE:g} s of warm-up. The stub "
        f"answers in steps of {STEP * 1000:g} ms, on the same two cores. Load average at the end: "
        f"{os.getloadavg()[0]:.1f}."
    )
    return made


def row(found: Seen, seconds: float, load: tuple[int, bool, int]) -> list[str]:
    """Return the cells of one load."""
    episodes, blocking, processes = load
    bound = episodes / (ENGINE + USER * found.users / max(found.turns, 1))
    rate = found.turns / seconds
    tail, largest = found.gaps[int(len(found.gaps) * 0.99)], found.gaps[-1]
    return [
        f"{episodes:,}",
        "blocking" if blocking else "async",
        str(processes),
        number(rate),
        f"{rate / bound:.3f}",
        f"{tail:.1f}",
        f"{largest:.0f}",
        number(found.cpu / max(found.turns, 1) * 1e6),
    ]
