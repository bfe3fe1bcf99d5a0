"""Misbehaving environments next to good ones: a fault is its own episode's and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.episodes import agent, judge_tokens, serving
from support.faults.size import FULL, sampled
from support.faults.tally import Tally, contents
from support.faults.trouble import WRONG, TroubledFactory
from support.loop_clock import skip
from support.toy_environment import look

from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.runner import Runner, session_id
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Status, StopReason

pytestmark = pytest.mark.faults

PARAMS = {"temperature": 1.0, "max_new_tokens": 256}
STEP_TIMEOUT = 100_000.0
"""Seconds, more than a test has. They pass at once (`let_time_pass`) when all faults hang."""
PONDS = 40 if FULL else 15
HARMLESS = ("close", "aclose", "metrics")
"""Places at which a failure takes nothing from the episode."""


async def play(
    tokenizer: Any, wrongs: Sequence[str], ponds: int, concurrency: int
) -> list[Episode]:
    """Play `ponds` good tasks and one for each of `wrongs`; judge the tokens of each episode."""
    factory = TroubledFactory(wrongs, ponds)
    found: list[Episode] = []
    async with serving(tokenizer, look, max_resumes=0) as (engine, served):

        def make() -> Any:
            made = agent(served)
            made.step_timeout = STEP_TIMEOUT
            return made

        settings = RunSettings(sampling_params=PARAMS, concurrency=concurrency, max_turns=8)
        tasks = factory.tasks("test")
        async with asyncio.TaskGroup() as group:
            run = group.create_task(Runner(factory, make, settings).run(tasks, found.append))
            group.create_task(
                let_time_pass(
                    run, lambda: len(factory.hanging) == min(concurrency, len(tasks) - len(found))
                )
            )
        for episode in found:
            key = session_id(factory.name, episode.task_id, episode.sample)
            judge_tokens(episode.result.trajectories, engine, key)
    return found


async def let_time_pass(run: asyncio.Task[None], all_hang: Callable[[], bool]) -> None:
    """Move the clock on whenever all episodes that are played hang, until the run ends."""
    while not run.done():
        if all_hang():
            skip(STEP_TIMEOUT + 1)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("concurrency", [2, 16])
async def test_every_fault_is_its_own_episodes(
    tokenizer: Any, tally: Tally, concurrency: int, caplog: pytest.LogCaptureFixture
) -> None:
    names, ponds = sampled(WRONG, 30), PONDS
    keys = [(task.id, 0) for task in TroubledFactory(names, ponds).tasks("test")]
    alone = contents(await play(tokenizer, [], ponds, concurrency))
    found = await play(tokenizer, names, ponds, concurrency)
    tally.tried(len(names))
    tally.played(found, keys, alone)
    tally.texts(caplog.text)
    tally.check()
    assert len(WRONG) >= 60
    wrong = {f"bad-{n}": name for n, name in enumerate(names)}
    ends = {wrong[e.task_id]: e.result for e in found if e.task_id in wrong}
    odd = {
        name: result.info.get("error")
        for name, result in ends.items()
        if result.stop_reason is StopReason.INTERNAL_ERROR
    }
    assert not odd, odd
    kept = [
        name
        for name, result in ends.items()
        if WRONG[name][0] in HARMLESS and result.status is not Status.COMPLETED
    ]
    assert not kept, kept
