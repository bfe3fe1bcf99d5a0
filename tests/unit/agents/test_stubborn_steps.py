"""Coroutines of environments that swallow their cancellation, or cancel the task that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from support.loop_clock import skip
from support.patience import PATIENCE
from support.scripted_runs import AsyncScripted, ScriptedFactory, Talker, play

from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runtime.foreign import LEAVE_SECONDS
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Episode, StopReason, Task


class Stubborn:
    """An `act` whose calls of `name` in t-1 go on whatever cancels them, until `free` is set."""

    def __init__(self, name: str) -> None:
        self.name, self.free, self.begun, self.cancelled = name, False, 0, 0

    async def __call__(self, name: str, task: Task) -> Any:
        if name != self.name or task.id != "t-1":
            return
        self.begun += 1
        while not self.free:
            try:
                await asyncio.sleep(0.001 if self.cancelled else 3600)
            except asyncio.CancelledError:
                self.cancelled += 1


@contextlib.asynccontextmanager
async def freed(act: Stubborn) -> AsyncIterator[None]:
    """Let what `act` holds end with the test."""
    try:
        yield
    finally:
        act.free = True
        await asyncio.sleep(0.01)


async def until(playing: asyncio.Future[Any], *, left: Stubborn) -> None:
    """Cancel nothing; wait until the stubborn call is cancelled, and let the time to leave it
    pass.
    """
    while not left.cancelled and not playing.done():
        await asyncio.sleep(0.001)
    skip(LEAVE_SECONDS + 1)
    await asyncio.wait([playing], timeout=PATIENCE)
    assert playing.done(), "the run waits for a coroutine that does not end"


@pytest.mark.parametrize("name", ["reset", "step"])
async def test_a_call_that_swallows_its_cancellation_is_left_when_its_time_is_over(
    name: str,
) -> None:
    stubborn = Stubborn(name)
    factory = ScriptedFactory(lambda: AsyncScripted(stubborn), count=4)
    async with freed(stubborn):
        playing = asyncio.create_task(play(factory, step_timeout=600, concurrency=1))
        while not stubborn.begun:
            await asyncio.sleep(0.001)
        skip(601)
        await until(playing, left=stubborn)
        episodes = await playing
    assert [episode.result.reward for episode in episodes] == [1.0, None, 1.0, 1.0]
    late = episodes[1].result
    assert late.stop_reason is StopReason.TIME_LIMIT
    message = (
        f"AsyncScripted.{name} took more than 600 s, and is still running: its coroutine "
        f"suppresses CancelledError"
    )
    assert message in late.info["error"]["message"]
    assert factory.made[1].closed == 1


@pytest.mark.parametrize("name", ["metrics", "close"])
async def test_a_call_after_the_end_that_swallows_its_cancellation_is_left(name: str) -> None:
    stubborn = Stubborn(name)
    factory = ScriptedFactory(lambda: AsyncScripted(stubborn), count=2)
    async with freed(stubborn):
        playing = asyncio.create_task(play(factory, step_timeout=600, concurrency=1))
        while not stubborn.begun:
            await asyncio.sleep(0.001)
        skip(601)
        await until(playing, left=stubborn)
        episodes = await playing
    assert [episode.result.reward for episode in episodes] == [1.0, 1.0]
    assert "and is still running" in episodes[1].result.info[f"{name}_error"]["message"]


async def test_a_run_that_is_stopped_does_not_wait_for_it() -> None:
    stubborn = Stubborn("step")
    factory = ScriptedFactory(lambda: AsyncScripted(stubborn), count=2)
    episodes: list[Episode] = []
    calls = Threads(1)
    runner = Runner(factory, lambda: Talker(calls), RunSettings(concurrency=1))
    async with freed(stubborn):
        playing = asyncio.create_task(runner.run(factory.tasks("test"), episodes.append))
        while not stubborn.begun:
            await asyncio.sleep(0.001)
        playing.cancel()
        await until(playing, left=stubborn)
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert [episode.task_id for episode in episodes] == ["t-0"]


def test_the_end_of_the_event_loop_does_not_wait_for_it() -> None:
    stubborn = Stubborn("step")
    factory = ScriptedFactory(lambda: AsyncScripted(stubborn), count=2)
    rounds = 0

    async def main() -> list[Episode]:
        playing = asyncio.create_task(play(factory, step_timeout=600, concurrency=1))
        while not stubborn.begun:
            await asyncio.sleep(0.001)
        skip(601)
        await until(playing, left=stubborn)
        asyncio.get_running_loop().call_soon(count)
        return await playing

    def count() -> None:
        nonlocal rounds
        rounds += 1
        stubborn.free = rounds > 1000  # it would be waited for until then
        asyncio.get_running_loop().call_soon(count)

    assert len(asyncio.run(main())) == 2
    assert not stubborn.free


async def test_a_step_that_cancels_its_own_task_and_goes_on_has_its_result() -> None:
    async def act(name: str, task: Task) -> Any:
        running = asyncio.current_task()
        assert running is not None
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    episodes = await play(ScriptedFactory(lambda: AsyncScripted(act), count=3))
    assert [(episode.result.stop_reason, episode.result.reward) for episode in episodes] == [
        (StopReason.DONE, 1.0)
    ] * 3
    assert [episode.result.metrics["env/seen"] for episode in episodes] == [1.0] * 3


async def test_what_a_call_sets_in_its_context_is_there_in_the_next() -> None:
    seen: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar("seen")

    async def act(name: str, task: Task) -> Any:
        seen.set({**seen.get({}), name: task.index})
        if name == "close":
            found.append(seen.get())

    found: list[Mapping[str, int]] = []
    await play(ScriptedFactory(lambda: AsyncScripted(act), count=2))
    assert sorted(found, key=lambda one: one["reset"]) == [
        {"reset": index, "step": index, "metrics": index, "close": index} for index in range(2)
    ]
