"""Steps that never return: they cost their own episodes, not the threads of the others."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from support.loop_clock import skip
from support.scripted_runs import Scripted, ScriptedFactory, Talker, play

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs import runner
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Episode, Observation, StepResult, StopReason, Task


class Hanging:
    """An `act` whose steps hang in the tasks of `names` until `free` is set."""

    def __init__(self, *names: str) -> None:
        self.names, self.free, self.hung = names, threading.Event(), 0

    def __call__(self, name: str, task: Task) -> Any:
        if name == "step" and task.id in self.names:
            self.hung += 1
            self.free.wait(60)


async def test_two_hanging_tasks_of_forty_take_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_FIRST_PAUSE", 0.0)
    hanging = Hanging("t-0", "t-1")
    factory = ScriptedFactory(lambda: Scripted(hanging), count=40)
    playing = asyncio.create_task(
        play(factory, step_timeout=600, reruns=2, concurrency=2, threads=2)
    )
    try:
        for attempts in range(1, 4):
            while hanging.hung < 2 * attempts:
                await asyncio.sleep(0.001)
            skip(601)
        episodes = await playing
    finally:
        hanging.free.set()
    late = {
        episode.task_id: episode.result for episode in episodes if episode.result.reward is None
    }
    assert late.keys() == {"t-0", "t-1"}
    assert {result.stop_reason for result in late.values()} == {StopReason.TIME_LIMIT}
    assert sum(episode.result.reward == 1.0 for episode in episodes) == 38


class Endless(Sequence[Any]):
    """A sequence whose end is never reached."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: Any) -> Any:
        return {"role": "user", "content": "More."}


class EndlessMapping(dict[str, Any]):
    def items(self) -> Any:
        return ((f"key {at}", at) for at in itertools.count())


@pytest.mark.parametrize(
    ("name", "returned"),
    [
        ("reset", Observation(Endless())),
        ("reset", Observation([{"role": "user", "content": "Begin."}], Endless())),
        ("step", StepResult(Endless())),
        ("step", StepResult([{"role": "user", "content": Endless()}])),
        ("step", StepResult([EndlessMapping(role="user", content="More.")])),
        ("step", StepResult([], 1.0, True, info=EndlessMapping())),
    ],
)
async def test_an_endless_sequence_is_a_failure_of_its_episode(name: str, returned: Any) -> None:
    def act(method: str, task: Task) -> Any:
        return returned if method == name and task.id == "t-1" else None

    first, failed, last = await play(ScriptedFactory(lambda: Scripted(act), count=3))
    assert (first.result.reward, last.result.reward) == (1.0, 1.0)
    assert failed.result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "is a sequence endless?" in failed.result.info["error"]["message"]


async def test_endless_metrics_are_left_out() -> None:
    def act(method: str, task: Task) -> Any:
        return EndlessMapping() if method == "metrics" else None

    [episode] = await play(ScriptedFactory(lambda: Scripted(act), count=1))
    assert episode.result.reward == 1.0
    assert "is a sequence endless?" in episode.result.info["metrics_error"]["message"]


async def test_too_many_of_them_end_the_run_with_a_message_that_names_the_environment() -> None:
    hanging = Hanging(*(f"t-{index}" for index in range(100)))
    factory = ScriptedFactory(lambda: Scripted(hanging), count=100)
    episodes: list[Episode] = []
    try:
        calls = Threads(2, most_given_up=3, grace=0.0)
        agent = Talker(calls, step_timeout=600)
        run = Runner(factory, lambda: agent, RunSettings(concurrency=2)).run
        running = asyncio.create_task(run(factory.tasks("test"), episodes.append))
        seen = 0
        while not running.done():
            if hanging.hung > seen:
                seen = hanging.hung
                skip(601)
            await asyncio.sleep(0.001)
        with pytest.raises(ExceptionGroup) as stopped:
            await running
    finally:
        hanging.free.set()
    assert stopped.group_contains(
        UsageError, match=r"calls exceeded their time limit.*Scripted\.step"
    )
    assert len(episodes) < 10


async def test_waiting_for_a_thread_takes_nothing_from_the_time_of_a_step() -> None:
    first = Hanging("t-0")
    factory = ScriptedFactory(lambda: Scripted(first), count=2)
    playing = asyncio.create_task(play(factory, step_timeout=600, concurrency=2, threads=1))
    while not first.hung:
        await asyncio.sleep(0.001)
    for _ in range(5):
        skip(590 / 5)  # in which the other episode waits for the only thread
        await asyncio.sleep(0.001)
    first.free.set()
    while len(factory.made) < 2 or not factory.made[1].turns:
        await asyncio.sleep(0.001)
    skip(11)
    assert [episode.result.reward for episode in await playing] == [1.0, 1.0]
