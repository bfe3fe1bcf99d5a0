"""What others' environments and agents raise, exits included, costs their own episode only."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
from support.episodes import serving
from support.scripted_runs import AsyncScripted, Scripted, ScriptedFactory, Talker, play
from support.toy_environment import PondFactory

from toolroll import Environment, Runner, RunSettings, Status, StopReason, Task
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.episode import Episode
from toolroll.rollout.runtime.foreign import ForeignExitError, guarded
from toolroll.rollout.runtime.threads import Threads

BAD = {"t-3", "t-4", "t-11"}
EXITS = [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit, BaseException]


FAILED = (Status.ABORTED, StopReason.ENVIRONMENT_ERROR)
INTERNAL = (Status.ABORTED, StopReason.INTERNAL_ERROR)


def raising(where: str, kind: type[BaseException]) -> Callable[[str, Task], Any]:
    def act(name: str, task: Task) -> Any:
        if name == where and task.id in BAD:
            raise kind
        return None

    return act


def nothing(name: str, task: Task) -> None:
    return None


def environments(act: Callable[[str, Task], Any]) -> list[Callable[[], Environment]]:
    async def later(name: str, task: Task) -> Any:
        await asyncio.sleep(0)
        return act(name, task)

    scripted = lambda: Scripted(act, blocking=False)
    return [lambda: Scripted(act), scripted, lambda: AsyncScripted(later)]


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("where", ["reset", "step", "metrics", "close"])
@pytest.mark.parametrize("form", range(3))
async def test_an_exit_is_its_own_failure(where: str, kind: type[BaseException], form: int) -> None:
    """After the end of the episode, it takes nothing."""
    episodes = await play(ScriptedFactory(environments(raising(where, kind))[form]))
    in_episode = where in ("reset", "step")
    name = "error" if in_episode else f"{where}_error"
    errors = {each.task_id: each.result.info[name] for each in episodes if name in each.result.info}
    assert errors.keys() == BAD and len(episodes) == 20
    for error in errors.values():
        assert kind.__name__ in error["message"]
        assert not in_episode or f"Scripted.{where} failed" in error["message"]
    for episode in episodes:
        failed = in_episode and episode.task_id in BAD
        outcome = (episode.result.status, episode.result.stop_reason, episode.result.reward)
        assert outcome == ((*FAILED, None) if failed else (Status.COMPLETED, StopReason.DONE, 1.0))


@pytest.mark.parametrize("kind", EXITS)
async def test_factories_and_agents_may_exit(kind: type[BaseException], tokenizer: Any) -> None:
    """Hooks and replies of agents too."""

    def refuse(*_: Any) -> Any:
        raise kind

    async def exits(*_: Any, **named: Any) -> Any:
        raise kind

    [refused] = await play(ScriptedFactory(refuse, count=1))
    assert refused.result.stop_reason is StopReason.ENVIRONMENT_ERROR
    episodes: list[Episode] = []
    factory = PondFactory(3)
    exiting: Any = type("Exits", (), {"asolve": exits})
    runner = Runner(factory, exiting, RunSettings(concurrency=1))
    await runner.run(factory.tasks("test"), episodes.append)
    assert [episode.result.stop_reason for episode in episodes] == [StopReason.INTERNAL_ERROR] * 3
    assert episodes[0].result.info["error"]["type"] == kind.__name__
    hooked: Any = type("Hooked", (TrainableToolCallingAgent,), {"_build_initial_messages": refuse})
    silent: Any = type("Silent", (Talker,), {"reply": exits})
    async with serving(tokenizer, lambda request: "Fine.") as (_, served):
        for agent in (hooked(model=served), silent(served)):
            env = Scripted(nothing)
            result = await agent.asolve(env, task=Task("t", 0))
            assert (result.status, result.stop_reason) == INTERNAL
            assert kind.__name__ in result.info["error"]["message"]
            assert env.closed == 1


async def test_an_environment_that_cancels_its_own_task_has_failed() -> None:
    async def act(name: str, task: Task) -> None:
        if name == "step" and task.id == "t-2":
            own = asyncio.current_task()
            assert own is not None
            own.cancel()
            await asyncio.sleep(60)

    found = await play(ScriptedFactory(lambda: AsyncScripted(act), count=8), concurrency=2)
    failed = found.pop(2).result
    assert [episode.result.status for episode in found] == [Status.COMPLETED] * 7
    assert (failed.status, failed.stop_reason) == FAILED
    assert "AsyncScripted.step failed: CancelledError" in failed.info["error"]["message"]


class Ticks:
    """Calls `stop` after so many rounds of the event loop."""

    def __init__(self, count: int, stop: Callable[[], Any]) -> None:
        self.left, self.stop = count, stop
        self._next()

    def _next(self) -> None:
        if self.left == 0:
            self.stop()
        else:
            self.left -= 1
            asyncio.get_running_loop().call_soon(self._next)


async def naps(name: str, task: Task) -> None:
    for _ in range(2):
        await asyncio.sleep(0)


async def stubborn(name: str, task: Task) -> None:
    """Swallows the cancellation that meets it."""
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


async def converts(name: str, task: Task) -> None:
    for _ in range(2):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise ValueError("not I") from None


@pytest.mark.parametrize("nap", [naps, stubborn, converts, None])
async def test_a_real_cancellation_gets_through(nap: Callable[[str, Task], Any] | None) -> None:
    rounds = 0
    while True:
        make = lambda: AsyncScripted(nap) if nap else Scripted(nothing)
        factory = ScriptedFactory(make, count=3)
        episodes: list[Episode] = []
        talker = Talker(Threads(1))
        settings = RunSettings(concurrency=2, pace_gc=False)
        runner = Runner(factory, lambda made=talker: made, settings)  # type: ignore[misc]
        running = asyncio.create_task(runner.run(factory.tasks("test"), episodes.append))
        Ticks(rounds, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            pass
        else:
            assert len(episodes) == 3
            break
        while not all(env.closed for env in factory.made):  # the shielded closes
            await asyncio.sleep(0)
        assert all(episode.result.status is Status.COMPLETED for episode in episodes)
        assert all(env.closed == 1 for env in factory.made), f"after {rounds} rounds"
        rounds += 1
    assert rounds > 20 or nap is None  # with threads it depends on them


@pytest.mark.parametrize("form", range(3))
def test_a_ctrl_c_ends_the_run(form: int) -> None:
    pressed: list[str] = []

    def act(name: str, task: Task) -> Any:
        if name == "step" and task.id == "t-5":
            pressed.append(task.id)
            signal.raise_signal(signal.SIGINT)

    async def run() -> None:
        await play(ScriptedFactory(environments(act)[form]))

    # a shell's background job ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(run())
        if form == 1:  # without asyncio.run's handler it is raised in the environment's own code
            loop = asyncio.new_event_loop()
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(run())
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed


async def test_guarded_outside_of_an_event_loop_and_when_closed() -> None:
    with pytest.raises(ForeignExitError), guarded():
        raise SystemExit(0)
    with pytest.raises(ValueError, match="mine"), guarded():
        raise ValueError("mine")

    async def wait() -> None:
        with guarded():
            await asyncio.sleep(60)

    coroutine = wait()
    coroutine.send(None)
    await asyncio.to_thread(coroutine.close)  # raises RuntimeError if it does not end


async def test_an_error_without_text_says_where_it_was_raised() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError

    def act(name: str, task: Task) -> Any:
        if name == "step":
            raise Mute

    [mute] = await play(ScriptedFactory(lambda: Scripted(act), count=1))
    message = mute.result.info["error"]["message"]
    assert "Mute: (its text cannot be read: TypeError)" in message and "in _acted)" in message
