"""Episodes that wait between turns, on the embedded engine with a KV cache of limited size."""

import asyncio
import re
from typing import Any

import pytest
from openai import InternalServerError
from support.endpoints import Bench, endpoint
from support.episodes import agent, call, judge, serving
from support.listed_environment import LOOK
from support.loop_clock import skip
from support.scripted_runs import ScriptedFactory
from support.wire import until

from toolroll import Action, Environment, Episode, Observation, Runner, StepResult, StopReason, Task
from toolroll.endpoint import Endpoint
from toolroll.endpoint.in_process import ToolrollClient
from toolroll.rollout.engine import admission
from toolroll.rollout.settings import RunSettings
from toolroll.testing import EmbeddedEngine, Reply

TURNS, EPISODES = 5, 12
HELLO: Any = {"messages": [{"role": "user", "content": "Hello."}]}


def send(bench: Bench, session: str | None) -> asyncio.Task[Any]:
    """A request with a long text."""
    messages: Any = [{"role": "user", "content": f"{session or 'c'} " * 1200}]
    request = bench.client(session).chat.completions.create(model="m", messages=messages)
    return asyncio.create_task(request)


async def until_held(bench: Bench, count: int) -> None:
    """Wait until one request is at the engine, and `count` sessions wait."""

    async def is_held() -> bool:
        return bench.engine.held == 1 and await gauge(bench) == count

    await until(is_held, f"{count} sessions wait")


class Reads(Environment):
    """Gives a long answer to each of `TURNS` calls."""

    def reset(self, task: Task, seed: int) -> Observation:
        self.task, self.calls = task, 0
        return Observation([{"role": "user", "content": f"Go {task.id}."}], tools=[LOOK])

    async def step(self, action: Action) -> StepResult:
        self.calls += 1
        await asyncio.sleep(0)
        text = " ".join(f"{self.task.id}-{self.calls}-{word}" for word in range(60))
        tool = {"role": "tool", "tool_call_id": action.tool_calls[0].id, "content": text}
        return StepResult([tool], done=self.calls == TURNS, reward=1.0)


class Factory(ScriptedFactory):
    def tasks(self, split: str) -> list[Task]:
        return [Task(f"task {number}", number) for number in range(EPISODES)]


async def played(tokenizer: Any, share: float) -> tuple[EmbeddedEngine, list[Episode]]:
    async with serving(tokenizer, lambda request: call(), pool=5000) as (engine, model):
        model.admission = admission.Admission(model.engine, share)
        factory, episodes = Factory(Reads, name="reads"), list[Episode]()
        settings = RunSettings(concurrency=EPISODES, max_turns=TURNS + 1)
        runner = Runner(factory, lambda: agent(model, verify="sample"), settings)
        await runner.run(factory.tasks(""), episodes.append)
    return engine, episodes


async def test_a_run_computes_less_twice(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_SLOW", 1e6)  # no step is slow, however busy this machine is
    engines = {share: await played(tokenizer, share) for share in (0.0, 1.0)}
    needed = sum(
        len(episode.result.trajectories[0]) - episode.result.trajectories[0].turns[-1].length
        for episode in engines[0.0][1]
    )
    twice = {}
    for share, (engine, episodes) in engines.items():
        assert [episode.result.stop_reason for episode in episodes] == [StopReason.DONE] * EPISODES
        for episode in episodes:
            judge(episode.result, engine, f"reads/{episode.task_id}#0")
        twice[share] = engine.cache.computed - needed
    held = [episode.result.metrics.get("held_turns", 0.0) for episode in engines[1.0][1]]
    assert twice[0.0] >= 3 * twice[1.0] and sum(held) > 0
    assert all("held_turns" not in episode.result.metrics for episode in engines[0.0][1])


async def test_the_endpoint_holds_sessions_and_forgets_them(tokenizer: Any) -> None:
    hold = asyncio.Event()
    async with endpoint(tokenizer, lambda request: Reply("Fine.", hold=hold), pool=2000) as bench:
        created = [send(bench, session) for session in ("a", "b", None)]
        await until_held(bench, 2)
        hold.set()
        await asyncio.gather(*created)
        for session in ("a", "b"):
            async with bench.http.delete(f"{bench.url}/sessions/{session}") as response:
                assert response.status == 200
        assert await gauge(bench) == 0
        [unnamed] = bench.endpoint.sessions.all()
        assert list(bench.served.admission._episodes) == [unnamed.id]
        await bench.endpoint.sessions.drop(unnamed.id)
        assert not bench.served.admission._episodes


async def test_a_request_that_is_held_back_does_not_time_out(tokenizer: Any) -> None:
    hold = asyncio.Event()
    policy = lambda seen: Reply("Fine.", hold=hold if seen.routing_key == "first" else None)
    async with endpoint(tokenizer, policy, pool=2000, settings={"timeout": 30}) as bench:
        first, second = send(bench, "first"), send(bench, "second")
        await until_held(bench, 1)
        skip(40)
        with pytest.raises(InternalServerError, match="in time"):
            await first
        assert (await second).choices[0].message.content == "Fine."


async def test_all_choices_of_one_request_are_counted_to_the_last(tokenizer: Any) -> None:
    hold = asyncio.Event()
    policy = lambda seen: Reply("Fine.", hold=hold if seen.call else None)
    async with endpoint(tokenizer, policy, pool=2000) as bench:
        admitted = bench.served.admission._episodes
        create = bench.client(None).chat.completions.create
        created = asyncio.create_task(create(model="m", n=2, **HELLO))

        async def one_is_left() -> bool:
            return bench.engine.held == 1 and [e.turns for e in admitted.values()] == [1]

        try:
            await until(one_is_left, "one of two choices is left")
        finally:
            hold.set()
        await created
        [unnamed] = bench.endpoint.sessions.all()
        await bench.endpoint.sessions.drop(unnamed.id)
        assert not admitted


async def test_an_endpoint_that_closes_leaves_no_sessions_behind(tokenizer: Any) -> None:
    async with serving(tokenizer, lambda request: Reply("Fine.")) as (_, model):
        async with Endpoint(model) as opened:
            client = ToolrollClient(opened)
            await client.chat.completions.create(**HELLO)
            assert model.admission._episodes
        assert not model.admission._episodes


async def gauge(bench: Bench) -> float:
    async with bench.http.get(f"{bench.url}/metrics") as response:
        found = re.search(r"^toolroll_sessions_held\S* (\S+)", await response.text(), re.MULTILINE)
    assert found is not None
    return float(found[1])
