"""The runner: who is played, how often, under which seed, and what a failure does to the others."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.episodes import agent, serving
from support.loop_clock import skip, skip_until
from support.results import content
from support.toy_environment import PondFactory, look

from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.runs.runner import (
    Runner,
    RunStoppedError,
    episode_seed,
    expected_calls,
    task_hash,
)
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Action, Episode, InteractionResult, Status, StopReason, Task
from toolroll.testing import Reply

PARAMS = {"temperature": 1.0, "max_new_tokens": 256}


def runner(factory: PondFactory, served: Model, **settings: Any) -> Runner:
    return Runner(factory, lambda: agent(served), RunSettings(sampling_params=PARAMS, **settings))


async def play(
    factory: PondFactory, served: Model, *, done: Any = frozenset(), **settings: Any
) -> list[Episode]:
    episodes: list[Episode] = []
    await runner(factory, served, **settings).run(factory.tasks("test"), episodes.append, done=done)
    return sorted(episodes, key=lambda found: (found.task_index, found.sample))


def alike(episodes: list[Episode]) -> list[dict[str, Any]]:
    """What is the same in every run."""
    return [content(played, circumstances=False) for played in episodes]


async def test_every_pair_once_and_the_seed_does_not_hang_on_the_order(tokenizer: Any) -> None:
    factory = PondFactory(5)
    async with serving(tokenizer, look) as (_, served):
        wide = await play(factory, served, samples=3, concurrency=15)
        narrow = await play(factory, served, samples=3, concurrency=1)
    pairs = [(f"t-{task}", sample) for task in range(5) for sample in range(3)]
    assert [(found.task_id, found.sample) for found in wide] == pairs
    assert alike(wide) == alike(narrow)
    assert len({found.seed for found in wide}) == 15
    assert {found.result.reward for found in wide} == {0.0, 1.0}


def test_seeds() -> None:
    episodes = [(0, "t-1", 2), (1, "t-1", 2), (0, "t-2", 2), (0, "t-1", 3), (0, "t-1/2", 0)]
    seeds = [episode_seed(*episode) for episode in episodes]
    assert seeds == [episode_seed(*episode) for episode in episodes]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_hash_of_a_task_changes_with_its_data_only() -> None:
    data = {"prompt": "Hi", "books": [{"title": "A", "year": 1}]}
    turned = {"books": [{"year": 1, "title": "A"}], "prompt": "Hi"}
    known = "82ce4a216266ec584f0eb9e78d08b4a7"
    assert task_hash("desk", Task("t", 0, "test", data)) == known, "the same in every process"
    assert task_hash("desk", Task("t", 7, "train", turned)) == known
    others = [("tau", "t", data), ("desk", "u", data), ("desk", "t", {**data, "prompt": "Hello"})]
    assert known not in {task_hash(env, Task(name, 0, "", d)) for env, name, d in others}


def test_the_hash_of_a_task_does_not_depend_on_addresses() -> None:
    class Board:
        pass

    boards = [Board(), Board()]
    assert len({task_hash("e", Task("t", 0, "", {"board": board})) for board in boards}) == 1
    rules = [lambda: 1, lambda: 1]
    assert len({task_hash("e", Task("t", 0, "", {"rule": rule})) for rule in rules}) == 1


async def test_the_calls_of_a_reference_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    desk, threads, free = find_environment("desk"), Threads(1), threading.Event()
    task = desk.tasks("test")[0]
    calls = await expected_calls(desk, task, threads)
    assert [call["name"] for call in calls[:1]] == ["find_member"]
    assert calls[0]["arguments"] == {"card": task.data["card"]}

    async def reference(task: Task) -> Any:
        return desk.reference(task)

    later: Any = SimpleNamespace(reference=reference)
    assert await expected_calls(later, task, threads) == calls
    broken: Any = SimpleNamespace(reference=lambda task: 1 / 0)
    assert await expected_calls(broken, Task("t", 0), threads) == []
    assert "the reference of task t is not recorded: ZeroDivisionError" in caplog.text
    stuck: Any = SimpleNamespace(reference=lambda task: free.wait(60))
    assert await skip_until(expected_calls(stuck, Task("u", 0), threads), seconds=61) == []
    free.set()
    assert "the reference of task u is not recorded: TimeoutError" in caplog.text


async def test_what_is_done_is_not_played_again(tokenizer: Any) -> None:
    factory = PondFactory(4)
    done = {("t-0", 0), ("t-1", 1), ("t-2", 0), ("t-2", 1)}
    async with serving(tokenizer, look) as (_, served):
        episodes = await play(factory, served, samples=2, done=done)
        left = {("t-0", 1), ("t-1", 0), ("t-3", 0), ("t-3", 1)}
        assert {(found.task_id, found.sample) for found in episodes} == left
        assert await play(factory, served, samples=1, done={(f"t-{i}", 0) for i in range(4)}) == []


async def test_no_more_than_the_limit_at_once(tokenizer: Any) -> None:
    running, most, three = Counter[str](), 0, asyncio.Barrier(3)

    class Watched:
        async def asolve(self, env: Any, *args: Any, **named: Any) -> InteractionResult:
            nonlocal most
            running["now"] += 1
            most = max(most, running["now"])
            await three.wait()
            running["now"] -= 1
            return InteractionResult("", 1.0, [], {})

    factory = PondFactory(21)
    episodes: list[Episode] = []
    await Runner(factory, Watched, RunSettings(concurrency=3)).run(
        factory.tasks("test"), episodes.append
    )
    assert (len(episodes), most) == (21, 3)


async def test_a_failed_episode_played_again_is_as_if_nothing_had_been(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolroll.rollout.runs.runner._FIRST_PAUSE", 0.0)
    tries = Counter[str]()

    def flaky(task: Task, action: Action) -> None:
        tries[task.id] += 1
        # in its first attempt, and in the second step of its second one
        if task.id == "t-3" and tries[task.id] in (1, 3):
            raise OSError("the pond is closed")

    async with serving(tokenizer, look) as (_, served):
        undisturbed = await play(PondFactory(4), served)
        factory = PondFactory(4, flaky)
        episodes = await play(factory, served, reruns=2)
    assert [found.result.metrics["reruns"] for found in episodes] == [0, 0, 0, 2]
    assert alike(episodes) == alike(undisturbed)
    assert len(factory.made) == 6


async def test_reruns_end_and_fail_as_data(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.rollout.runs.runner._FIRST_PAUSE", 0.0)

    def broken(task: Task, action: Action) -> None:
        if task.id == "t-1":
            raise OSError("the pond is closed")

    factory = PondFactory(3, broken)
    async with serving(tokenizer, look) as (_, served):
        episodes = await play(factory, served, reruns=2)
    done, aborted = Status.COMPLETED, Status.ABORTED
    assert [found.result.status for found in episodes] == [done, aborted, done]
    failed = episodes[1].result
    assert (failed.reward, failed.stop_reason) == (None, StopReason.ENVIRONMENT_ERROR)
    assert failed.metrics["reruns"] == 2.0
    assert "the pond is closed" in failed.info["error"]["message"]
    assert len(factory.made) == 5


async def test_what_would_fail_again_is_not_played_again() -> None:
    class Broken:
        async def asolve(self, env: Any, *args: Any, **named: Any) -> InteractionResult:
            raise ZeroDivisionError("a defect of the agent")

    factory = PondFactory(2)
    episodes: list[Episode] = []
    await Runner(factory, Broken, RunSettings(reruns=5)).run(factory.tasks("test"), episodes.append)
    assert [found.result.stop_reason for found in episodes] == [StopReason.INTERNAL_ERROR] * 2
    error = {"type": "ZeroDivisionError", "message": "a defect of the agent"}
    assert episodes[0].result.info["error"] == error
    assert len(factory.made) == 2


async def test_a_factory_that_fails_is_data_too(tokenizer: Any) -> None:
    class Dry(PondFactory):
        def make(self, options: Any) -> Any:
            if len(self.made) == 1:
                self.made.append(super().make(options))
                raise EnvironmentFailure("no water")
            return super().make(options)

    async with serving(tokenizer, look) as (_, served):
        episodes = await play(Dry(3), served, concurrency=1)
    done, failed = StopReason.DONE, StopReason.ENVIRONMENT_ERROR
    assert [found.result.stop_reason for found in episodes] == [done, failed, done]


async def test_an_episode_has_its_time(tokenizer: Any) -> None:
    hold = asyncio.Event()

    def slow(request: Any) -> Any:
        text = look(request)
        return Reply(text, hold=hold, hold_after=2) if "pond t-1," in request.text else text

    factory = PondFactory(3)
    found: list[Episode] = []
    async with serving(tokenizer, slow) as (engine, served):
        playing = asyncio.create_task(
            runner(factory, served, episode_timeout=600).run(factory.tasks("test"), found.append)
        )
        await engine.until(lambda engine: engine.held == 1)
        while len(found) < 2:
            await asyncio.sleep(0)
        skip(601)
        await playing
        await served.engine.aclose()  # the aborts are through
        assert engine.held == 0
    episodes = sorted(found, key=lambda episode: episode.task_index)
    late = episodes[1].result
    outcome = (late.status, late.stop_reason, late.reward)
    assert outcome == (Status.ABORTED, StopReason.TIME_LIMIT, None)
    assert "took more than 600 s" in late.info["error"]["message"]
    assert [episodes[at].result.status for at in (0, 2)] == [Status.COMPLETED] * 2
    assert [entry.aborted for entry in engine.log if entry.routing_key == "pond/t-1#0"] == [True]


async def test_cancelled_it_gives_nothing_unfinished_out(tokenizer: Any) -> None:
    hold = asyncio.Event()

    def stands(request: Any) -> Any:
        index = int(request.text.split("pond t-")[1].split(",")[0])
        return look(request) if index < 3 else Reply(look(request), hold=hold, hold_after=1)

    factory = PondFactory(8)
    episodes: list[Episode] = []
    async with serving(tokenizer, stands) as (engine, served):
        running = asyncio.create_task(
            runner(factory, served, concurrency=8).run(factory.tasks("test"), episodes.append)
        )
        while len(episodes) < 3 or engine.held < 5:
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await served.engine.aclose()
        assert sorted(found.task_id for found in episodes) == ["t-0", "t-1", "t-2"]
        aborted = [entry.routing_key for entry in engine.log if entry.aborted]
        assert sorted(aborted) == [f"pond/t-{index}#0" for index in range(3, 8)]


async def test_it_gives_up_where_everything_fails(tokenizer: Any) -> None:
    def broken(task: Task, action: Action) -> None:
        if task.index >= 4:
            raise OSError("the pond is closed")

    factory = PondFactory(100, broken)
    episodes: list[Episode] = []
    async with serving(tokenizer, look) as (_, served):
        with pytest.raises(ExceptionGroup) as stopped:
            await runner(factory, served, concurrency=1, give_up_after=6).run(
                factory.tasks("test"), episodes.append
            )
    [error] = stopped.value.exceptions
    assert isinstance(error, RunStoppedError)
    assert "6 attempts at episodes failed in a row" in str(error)
    assert "the pond is closed" in str(error)
    assert sum(found.result.reward is not None for found in episodes) == 4
    assert len(factory.made) == 10, "nothing is begun behind that"


async def test_settings_that_cannot_work_end_it_at_once(tokenizer: Any) -> None:
    factory = PondFactory(50)
    async with serving(tokenizer, look) as (_, served):
        settings = RunSettings(sampling_params={"temprature": 1.0}, concurrency=4)
        wrong = Runner(factory, lambda: agent(served), settings)
        with pytest.raises(ExceptionGroup) as stopped:
            await wrong.run(factory.tasks("test"), lambda episode: None)
    assert stopped.group_contains(UsageError, match="temprature")
    assert len(factory.made) <= 4


async def test_each_episodes_seed_can_go_to_the_engine(tokenizer: Any) -> None:
    async with serving(tokenizer, look) as (engine, served):
        [found] = await play(PondFactory(1), served, sampling_seed=True)
        [plain] = await play(PondFactory(1), served)
        seeds: list[Mapping[str, Any]] = [entry.sampling_params for entry in engine.log]
    assert seeds[0]["sampling_seed"] == found.seed == episode_seed(0, "t-0", 0)
    assert "sampling_seed" not in seeds[1]
    assert plain.seed == found.seed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("samples", 0), ("concurrency", 0), ("max_turns", 0)),
        *(("reruns", -1), ("episode_timeout", 0), ("give_up_after", 0)),
    ],
)
def test_impossible_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        RunSettings(**{name: value})
