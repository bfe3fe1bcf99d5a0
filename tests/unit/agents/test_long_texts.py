"""Long texts: what is longer than an observation may be is a failure, and nothing long is
encoded on the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.episodes import agent, call, judge, serving
from support.listed_environment import ListedWorld
from support.scripted_runs import Scripted, ScriptedFactory, play

from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.text_agent import make_do_nothing
from toolroll.agents.tool_calling import TrainableToolCallingAgent, make_agent
from toolroll.evaluation.openai_baseline import make_baseline
from toolroll.evaluation.run_config import RunConfig
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError, EnvironmentFailure
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import (
    Action,
    InteractionResult,
    Observation,
    Status,
    StepResult,
    StopReason,
    Task,
)
from toolroll.testing import PolicyRequest

LONG = 100_000
TEXT = "a frog, a fish " * 8_000
assert len(TEXT) > LONG


class Watch:
    """Notes what is called with long texts on the event loop's thread, and what in another one."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = threading.get_ident()
        self.on_loop, self.elsewhere = set[str](), set[str]()
        template = model.template
        for owner, name, size in (
            (template.encoder, "encode", lambda text, *_, **__: len(text)),
            (template.encoder, "decode", lambda ids: 2 * len(ids)),
            (
                template.renderer,
                "render_prepared",
                lambda messages, *_, **__: sum(len(m.get("content") or "") for m in messages),
            ),
            (model.parser, "parse", lambda text, **_: len(text)),
        ):
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name), size))

    def _noting(
        self, name: str, function: Callable[..., Any], size: Callable[..., int]
    ) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            if size(*args, **named) > LONG:
                (self.on_loop if threading.get_ident() == self.loop else self.elsewhere).add(name)
            return function(*args, **named)

        return noted


def says(request: PolicyRequest) -> str:
    turns = request.text.count("<tool_call>")
    return "Done." if turns > 1 else call(at="x")


@pytest.mark.parametrize(
    "world",
    [
        ListedWorld(system=TEXT, tool_texts=["a frog"]),
        ListedWorld(user_texts=[TEXT], tool_texts=["a frog"]),
        ListedWorld(tool_texts=[TEXT]),
    ],
    ids=["system prompt", "user text", "tool result"],
)
async def test_no_long_text_is_encoded_on_the_event_loop(
    tokenizer: Any, world: ListedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer, says, context_length=1_000_000) as (engine, model):
        watch = Watch(model, monkeypatch)
        result = await agent(model, verify="off").asolve(world, task=Task("t", 0), session_id="s")
        judge(result, engine, "s")
    assert result.status is Status.COMPLETED
    assert result.metrics["turns"] == 2
    assert watch.on_loop == set()
    assert watch.elsewhere >= {"encode", "render_prepared"}


async def test_no_long_reply_is_parsed_on_the_event_loop(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer, lambda request: TEXT, context_length=1_000_000) as (
        engine,
        model,
    ):
        watch = Watch(model, monkeypatch)
        player = agent(model, verify="off")
        player.sampling_params = {"max_new_tokens": 200_000}
        result = await player.asolve(ListedWorld(), task=Task("t", 0), session_id="s")
        judge(result, engine, "s")
    assert result.response == TEXT.strip()
    assert watch.on_loop == set()
    assert "parse" in watch.elsewhere


async def test_the_tokens_are_those_of_the_event_loop(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for limit in (0, 10**9):
        monkeypatch.setattr("toolroll.rollout.model.conversation.LONG", limit)
        monkeypatch.setattr("toolroll.rollout.model.conversation.LONG_REPLY", limit)
        async with serving(tokenizer, says) as (_, model):
            world = ListedWorld(tool_texts=["a frog", "a fish"], user_texts=["Hello.", "And?"])
            result = await agent(model).asolve(world, task=Task("t", 0), session_id="s")
            found.append([result.tokens, result.loss_mask, result.messages])
    assert found[0] == found[1]


LIMIT = 1_000_000


@pytest.mark.parametrize(
    "content", ["x" * LIMIT, "é" * (LIMIT // 2), [{"type": "text", "text": "x" * LIMIT}]]
)
async def test_an_observation_may_have_a_million_bytes(content: Any) -> None:
    result = await returned("step", StepResult([{"role": "user", "content": content}]))
    assert result.stop_reason is StopReason.MAX_TURNS


@pytest.mark.parametrize("content", ["x" * (LIMIT + 1), "é" * (LIMIT // 2 + 1)])
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_a_longer_observation_is_a_failure(where: str, content: str) -> None:
    messages = [{"role": "user", "content": content}]
    result = await returned(
        where, Observation(messages) if where == "reset" else StepResult(messages)
    )
    assert (result.status, result.stop_reason) == (Status.ABORTED, StopReason.ENVIRONMENT_ERROR)
    message = result.info["error"]["message"]
    assert f"Scripted.{where} returned 1000" in message
    assert "max_observation_bytes (1000000)" in message
    assert len(message) < 300


HALF = {"content": "x" * (LIMIT // 2)}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "y", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize(
    "more",
    [
        {"role": "user", "content": "y"},
        {"role": "tool", "tool_call_id": "none", "content": [{"type": "text", "text": "y"}]},
        {"role": "assistant", "content": "", "reasoning_content": "y"},
        TOOL,
    ],
)
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_all_that_one_call_returns_is_one_observation(
    where: str, more: dict[str, Any]
) -> None:
    halves = [{"role": "user", **HALF}, {"role": "tool", "tool_call_id": "none", **HALF}]
    make = Observation if where == "reset" else StepResult
    fits = await returned(where, make(halves))
    assert fits.stop_reason is StopReason.MAX_TURNS
    longer = make(halves, tools=[more]) if more is TOOL else make([*halves, more])
    message = (await returned(where, longer)).info["error"]["message"]
    count = 2 if more is TOOL else 3
    assert (
        f"Scripted.{where} returned 1000001 bytes of text (500000 in the longest of {count} "
        f"messages)" in message
    )


async def test_an_action_error_counts_once_for_each_call_that_it_answers() -> None:
    class Refuses(Scripted):
        def step(self, action: Action) -> StepResult:
            raise ActionError("x" * (LIMIT // 2))

    world = EnvironmentRunner(
        Refuses(lambda name, task: None), Task("t", 0), 0, Threads(1).run_in_thread
    )
    call = ToolCall("look", {}, "{}", id="c")
    with pytest.raises(ActionError):
        await world.step(Action("", (call, call)))
    with pytest.raises(
        EnvironmentFailure, match=r"Refuses\.step raised an ActionError and returned 1500000 bytes"
    ):
        await world.step(Action("", (call, call, call)))


async def test_an_action_error_longer_than_the_limit_is_a_failure() -> None:
    def act(name: str, task: Task) -> Any:
        if name == "step":
            raise ActionError("x" * (LIMIT + 1))

    [episode] = await play(ScriptedFactory(lambda: Scripted(act), count=1))
    assert episode.result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "Scripted.step raised an ActionError" in episode.result.info["error"]["message"]


async def returned(where: str, value: Any) -> InteractionResult:
    """Return the result of one turn in which the method `where` returned `value`."""
    factory = ScriptedFactory(
        lambda: Scripted(lambda name, task: value if name == where else None), count=1
    )
    [episode] = await play(factory, max_turns=1)
    return episode.result


async def test_the_limit_is_a_setting_of_every_agent(tokenizer: Any) -> None:
    config = RunConfig(env="e", model="m", max_observation_bytes=10)
    world = ListedWorld(user_texts=["x" * 11])
    threads = Threads(1)
    async with serving(tokenizer, says) as (_, model):
        settings = config.agent_settings
        baseline = settings | {"endpoint": "http://127.0.0.1:1/v1", "model": "m"}
        del baseline["on_length"], baseline["verify"]
        given = {"max_observation_bytes": 10}
        for player in (
            make_agent(model, settings),
            make_do_nothing(threads, settings),
            make_baseline(threads, baseline),
            TrainableToolCallingAgent(model=model, rollout_args=given),
        ):
            result = await player.asolve(world, task=Task("t", 0))
            assert "max_observation_bytes (10)" in result.info["error"]["message"]
