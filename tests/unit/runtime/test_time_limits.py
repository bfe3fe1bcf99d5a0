"""Steps that never return, coroutines that swallow their cancellation, and the time in which a
server is waited for, which is no part of an episode's or a step's time.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from aiohttp import web
from support.client import client_of, request
from support.http import completion, says
from support.loop_clock import skip
from support.patience import PATIENCE
from support.scripted_runs import AsyncScripted, Scripted, ScriptedFactory, Talker, play

from toolroll import Episode, Runner, RunSettings, StopReason, Task
from toolroll.rollout.runs import runner
from toolroll.rollout.runtime.foreign import LEAVE_SECONDS
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.runtime.time_limit import not_counted, pausable


class Hanging:
    """An `act` whose steps hang in the tasks of `names` until `free` is set."""

    def __init__(self, *names: str) -> None:
        self.names, self.free, self.hung = names, threading.Event(), 0

    def __call__(self, name: str, task: Task) -> Any:
        if name == "step" and task.id in self.names:
            self.hung += 1
            self.free.wait(60)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_two_hanging_tasks_take_nothing_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_FIRST_PAUSE", 0.0)
    hanging = Hanging("t-0", "t-1")
    factory = ScriptedFactory(lambda: Scripted(hanging), count=40)
    settings: Any = {"step_timeout": 600, "reruns": 2, "concurrency": 2, "threads": 2}
    playing = asyncio.create_task(play(factory, **settings))
    try:
        for attempts in range(1, 4):
            await until(lambda count=2 * attempts: hanging.hung >= count)  # type: ignore[misc]
            skip(601)
        episodes = await playing
    finally:
        hanging.free.set()
    late = {each.task_id: each.result for each in episodes if each.result.reward is None}
    assert late.keys() == {"t-0", "t-1"}
    for result in late.values():
        assert result.stop_reason is StopReason.TIME_LIMIT
        assert result.info.keys() == {"error", "trainable"}, "metrics and close have a thread"
        assert "Scripted.step took more than 600 s" in result.info["error"]["message"]
    assert sum(episode.result.reward == 1.0 for episode in episodes) == 38


async def test_waiting_for_a_thread_takes_no_time_of_a_step() -> None:
    first = Hanging("t-0")
    factory = ScriptedFactory(lambda: Scripted(first), count=2)
    playing = asyncio.create_task(play(factory, step_timeout=600, concurrency=2, threads=1))
    await until(lambda: first.hung)
    for _ in range(5):
        skip(590 / 5)  # in which the other episode waits for the only thread
        await asyncio.sleep(0.001)
    first.free.set()
    await until(lambda: len(factory.made) > 1 and factory.made[1].turns)
    skip(11)
    assert [episode.result.reward for episode in await playing] == [1.0, 1.0]


# --- coroutines that swallow their cancellation, or cancel the task that runs them ----------------


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
async def holding(name: str, count: int) -> AsyncIterator[tuple[Stubborn, ScriptedFactory]]:
    """A stubborn act and `count` tasks; what the act holds ends with the test."""
    stubborn = Stubborn(name)
    try:
        yield stubborn, ScriptedFactory(lambda: AsyncScripted(stubborn), count=count)
    finally:
        stubborn.free = True
        await asyncio.sleep(0.01)


async def until_left(playing: asyncio.Future[Any], stubborn: Stubborn) -> None:
    """Wait until the stubborn call is cancelled, and let the time to leave it pass."""
    await until(lambda: stubborn.cancelled or playing.done())
    skip(LEAVE_SECONDS + 1)
    await asyncio.wait([playing], timeout=PATIENCE)
    assert playing.done(), "the run waits for a coroutine that does not end"


async def play_and_leave(stubborn: Stubborn, factory: ScriptedFactory) -> asyncio.Task[Any]:
    """A run that is over, although a call of it is still running."""
    playing = asyncio.create_task(play(factory, step_timeout=600, concurrency=1))
    await until(lambda: stubborn.begun)
    skip(601)
    await until_left(playing, stubborn)
    return playing


@pytest.mark.parametrize("name", ["reset", "step", "metrics", "close"])
async def test_a_call_that_swallows_cancellation_is_left(name: str, caplog: Any) -> None:
    """When its time is over. After the end of an episode, it costs only its own value."""
    error = "error" if name in ("reset", "step") else f"{name}_error"
    async with holding(name, 3) as (stubborn, factory):
        episodes = await (await play_and_leave(stubborn, factory))
    late = episodes[1].result
    reward, reason = (None, StopReason.TIME_LIMIT) if error == "error" else (1.0, StopReason.DONE)
    assert [episode.result.reward for episode in episodes] == [1.0, reward, 1.0]
    assert late.stop_reason is reason
    message = (
        f"AsyncScripted.{name} took more than 600 s, and is still running: its coroutine "
        f"suppresses CancelledError"
    )
    assert message in late.info[error]["message"]
    assert factory.made[1].closed == 1
    if error != "error":
        assert late.metrics[f"{name}_errors"] == 1
        logged = f"episode scripted/t-1#0 of task t-1: the environment's {name} failed: {message}"
        assert logged in caplog.text


async def test_a_run_that_is_stopped_does_not_wait_for_it() -> None:
    episodes, calls = list[Episode](), Threads(1)
    async with holding("step", 2) as (stubborn, factory):
        runner = Runner(factory, lambda: Talker(calls), RunSettings(concurrency=1))
        playing = asyncio.create_task(runner.run(factory.tasks("test"), episodes.append))
        await until(lambda: stubborn.begun)
        playing.cancel()
        await until_left(playing, stubborn)
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert [episode.task_id for episode in episodes] == ["t-0"]


def test_the_end_of_the_event_loop_does_not_wait_for_it() -> None:
    stubborn = Stubborn("step")
    factory = ScriptedFactory(lambda: AsyncScripted(stubborn), count=2)
    rounds = 0

    async def main() -> list[Episode]:
        playing = await play_and_leave(stubborn, factory)
        asyncio.get_running_loop().call_soon(count)
        episodes: list[Episode] = await playing
        return episodes

    def count() -> None:
        nonlocal rounds
        rounds += 1
        stubborn.free = rounds > 1000  # it would be waited for until then
        asyncio.get_running_loop().call_soon(count)

    assert len(asyncio.run(main())) == 2
    assert not stubborn.free


async def test_a_step_that_cancels_its_own_task_has_its_result() -> None:
    async def act(name: str, task: Task) -> Any:
        running = asyncio.current_task()
        assert running is not None
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    episodes = await play(ScriptedFactory(lambda: AsyncScripted(act), count=3))
    for result in (episode.result for episode in episodes):
        assert (result.stop_reason, result.reward) == (StopReason.DONE, 1.0)
        assert result.metrics["env/seen"] == 1.0


async def test_what_a_call_sets_in_its_context_is_there_in_the_next() -> None:
    seen: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar("seen")

    async def act(name: str, task: Task) -> Any:
        seen.set({**seen.get({}), name: task.index})
        if name == "close":
            at_close.append(seen.get())

    at_close: list[Mapping[str, int]] = []
    await play(ScriptedFactory(lambda: AsyncScripted(act), count=2))
    assert sorted(at_close, key=lambda calls: calls["reset"]) == [
        dict.fromkeys(("reset", "step", "metrics", "close"), index) for index in range(2)
    ]


# --- time that is not counted ---------------------------------------------------------------------


@pytest.mark.parametrize("first_out", [0, 1])
async def test_two_at_once_in_one_episode_pause_it_until_both_are_over(first_out: int) -> None:
    go = [asyncio.Event(), asyncio.Event()]

    async def wait(at: int) -> None:
        with not_counted(), not_counted():
            await go[at].wait()

    async with asyncio.timeout(600) as limit:
        end = limit.when()
        assert end is not None
        with pausable(limit):
            waiting = [asyncio.create_task(wait(at)) for at in range(2)]
            await asyncio.sleep(0)
            skip(601)
            go[first_out].set()
            await waiting[first_out]
            assert limit.when() is None
            skip(601)
            go[1 - first_out].set()
            await waiting[1 - first_out]
            now = limit.when()
            assert now is not None
            assert now - end == pytest.approx(1202, abs=10)
            with not_counted():
                skip(601)
            await asyncio.sleep(0)
    assert limit.when() == pytest.approx(end + 1803, abs=10)


async def test_a_limit_that_is_over_stays_over() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600) as limit:
            with pausable(limit):
                skip(601)
                try:
                    await asyncio.sleep(10)
                finally:
                    with not_counted():
                        assert limit.expired()


async def test_an_abort_after_a_broken_connection_takes_no_time() -> None:
    asked: list[str] = []

    async def generate(http: web.Request) -> web.StreamResponse:
        asked.append(http.path)
        if len(asked) == 1:
            assert http.transport is not None
            http.transport.abort()
        return web.json_response(completion([3]))

    async def abort(http: web.Request) -> web.StreamResponse:
        asked.append(http.path)
        skip(601)
        return await says({})(http)

    routes = {"/generate": generate, "/abort_request": abort}
    async with client_of(routes, abort_timeout=10_000) as engine:
        async with asyncio.timeout(600) as limit:
            with pausable(limit):
                found = await engine.generate(request())
    assert asked == ["/generate", "/abort_request", "/generate"]
    assert found.output_ids.tolist() == [3]
