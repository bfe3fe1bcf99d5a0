"""A model behind an OpenAI-compatible endpoint: played and scored like any other, and marked not
trainable.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr
from support.chat import UNFINISHED, Answer, completion, endpoint
from support.commands import toolroll
from support.listed_environment import TOOL, ListedWorld
from support.toy_environment import PondFactory

from toolroll.agents.chat_client import ChatClient, ChatClientConfig
from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.text_agent import DoNothingAgent
from toolroll.evaluation.openai_baseline import BaselineAgent, make_baseline
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import from_line, read_episodes, to_line
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import (
    Action,
    EnvironmentOptions,
    Episode,
    InteractionResult,
    Status,
    StopReason,
    Task,
)
from toolroll.testing import EmbeddedEngine, echo, serve_in_thread


def says(*arguments: Any, **named: Any) -> Answer:
    data = completion(*arguments, **named)
    return lambda body: web.json_response(data)


def fails(status: int, text: str) -> Answer:
    return lambda body: web.Response(status=status, text=text)


async def play(
    url: str, env: Any, params: dict[str, Any] | None = None, **settings: Any
) -> InteractionResult:
    config = ChatClientConfig(
        base_url=url, model="m", api_key=SecretStr("secret-key"), retries=2, backoff=0.001
    )
    threads = Threads(2)
    agent = BaselineAgent(threads, ChatClient(config), policy=CallPolicy(**settings))
    try:
        return await agent.asolve(
            env,
            None,
            params or {"temperature": 0.5, "max_new_tokens": 77},
            task=Task("t", 0),
            session_id="s",
        )
    finally:
        await agent.aclose()


LOOK = ("look", '{"at": "here"}')


async def test_an_episode(tokenizer: Any) -> None:
    world = ListedWorld(["Hello.", "Thanks."], ["A frog."])
    async with endpoint(
        says(None, [LOOK], reasoning_content="hm"),
        says("<think>a secret</think>\n\nIt is a frog."),
        says("Bye."),
    ) as server:
        result = await play(server.url, world)
    assert [message["role"] for message in result.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert result.messages[3] == {
        "role": "tool",
        "tool_call_id": "call_0",
        "name": "look",
        "content": "A frog.",
    }
    assert [action.content for action in world.seen] == ["", "It is a frog.", "Bye."], (
        "thoughts are nobody's business"
    )
    assert (result.status, result.stop_reason, result.reward, world.closed) == (
        Status.COMPLETED,
        StopReason.DONE,
        1.0,
        1,
    )
    assert result.trajectories == ()
    assert result.info["trainable"] is False
    assert result.metrics["turns"] == 3
    assert (
        result.metrics["prompt_tokens"],
        result.metrics["completion_tokens"],
        result.metrics["cached_tokens"],
    ) == (27, 12, 15)
    assert result.metrics["executed_calls/look"] == 1
    body = server.bodies[1]
    assert (body["model"], body["temperature"], body["max_tokens"], body["tools"]) == (
        "m",
        0.5,
        77,
        [TOOL],
    )
    assert all("reasoning_content" not in message for message in body["messages"])
    assert server.keys == ["Bearer secret-key"] * 3
    found = from_line(to_line(Episode("pond", "t", 0, 0, 1, result)))
    assert found.result.trajectories == ()


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (("look", '{"at": "he'), "invalid_json", "arguments must be a JSON object"),
        (("look", '"here"'), "bad_arguments", "must be a JSON object, not str"),
        (("look", '{"at": 3}'), "bad_arguments", '3 is not of type "string"'),
        (("jump", "{}"), "unknown_tool", "no tool named 'jump'; the tools are: look"),
    ],
)
async def test_a_call_that_cannot_be_executed_is_answered(
    call: tuple[str, str], kind: str, words: str
) -> None:
    world = ListedWorld(["Hello."], ["A frog."])
    async with endpoint(says(None, [call, LOOK]), says("Bye.")) as server:
        result = await play(server.url, world)
    assert result.metrics[f"invalid_calls/{kind}"] == 1
    [bad] = result.info["bad_calls"]
    assert (bad["call"], bad["status"]) == (0, kind)
    bad_call = result.messages[bad["message"]]["tool_calls"][bad["call"]]
    assert bad_call["function"]["name"] == call[0]
    answers = [message for message in result.messages if message["role"] == "tool"]
    assert words in answers[0]["content"]
    assert answers[1]["content"] == "A frog.", "the other one was executed"
    assert [
        found["function"]["name"] for found in server.bodies[1]["messages"][2]["tool_calls"]
    ] == [call[0], "look"]
    for sent in server.bodies[1]["messages"][2]["tool_calls"]:
        assert isinstance(json.loads(sent["function"]["arguments"]), dict), (
            "servers refuse a history with anything else"
        )
    assert result.reward == 1.0


@pytest.mark.parametrize(
    ("answer", "reason", "reward", "asked"),
    [
        (fails(400, "bad secret-key"), StopReason.ENGINE_ERROR, None, 1),
        (fails(500, "secret-key"), StopReason.ENGINE_ERROR, None, 3),
        (fails(200, '{"choices": []}'), StopReason.ENGINE_ERROR, None, 3),
        (fails(200, "[1]"), StopReason.ENGINE_ERROR, None, 3),
        (
            fails(400, '{"error": {"code": "context_length_exceeded", "message": "too long"}}'),
            StopReason.CONTEXT_FULL,
            0.0,
            1,
        ),
        (
            fails(400, "This model's maximum context length is 9 tokens. However, you requested"),
            StopReason.CONTEXT_FULL,
            0.0,
            1,
        ),
        (says("It is", finish="length"), StopReason.LENGTH, 0.0, 1),
    ],
)
async def test_how_it_can_end(
    answer: Answer, reason: StopReason, reward: float | None, asked: int
) -> None:
    world = ListedWorld(["Hello."])
    async with endpoint(answer) as server:
        result = await play(server.url, world)
    assert (result.stop_reason, result.reward, len(server.bodies), world.closed) == (
        reason,
        reward,
        asked,
        1,
    )
    assert "secret-key" not in json.dumps(result.info), "the key stands in no error"


@pytest.mark.parametrize("finish", [reason for reason in UNFINISHED if reason != "length"])
async def test_an_unfinished_answer_is_not_a_turn_of_a_baseline(finish: str | None) -> None:
    body = {"choices": [{"message": {"content": "Bye."}, "finish_reason": finish}]}
    async with endpoint(fails(200, json.dumps(body))) as server:
        result = await play(server.url, ListedWorld(["Hello."]))
    assert (result.stop_reason, result.reward) == (StopReason.ENGINE_ERROR, None)
    assert f"finish_reason {finish!r}" in result.info["error"]["message"]


async def test_a_refusal_is_the_text_of_a_baselines_turn() -> None:
    body = {
        "choices": [{"message": {"content": None, "refusal": "I cannot."}, "finish_reason": "stop"}]
    }
    async with endpoint(fails(200, json.dumps(body))) as server:
        result = await play(server.url, ListedWorld(["Hello."]))
    assert result.messages[-1]["content"] == "I cannot."


async def test_what_openai_does_not_know_can_be_left_out() -> None:
    threads = Threads(1)
    async with endpoint(says("Bye.")) as server:
        agent = BaselineAgent(
            threads,
            ChatClient(ChatClientConfig(base_url=server.url, model="m")),
            extra_params=False,
        )
        await agent.asolve(
            ListedWorld(["Hello."]), None, {"top_k": 5, "top_p": 0.5, "sampling_seed": 3}
        )
        await agent.aclose()
    assert (server.bodies[0]["top_p"], server.bodies[0]["seed"]) == (0.5, 3)
    assert "top_k" not in server.bodies[0]


async def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    threads = Threads(1)
    with pytest.raises(UsageError, match="NO_SUCH_KEY, which is not set"):
        make_baseline(
            threads, {"endpoint": "http://x/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}
        )
    with pytest.raises(UsageError, match="must begin with http"):
        make_baseline(threads, {"endpoint": "x/v1", "model": "m"})


def test_a_baselines_run(tmp_path: Any, tokenizer: Any) -> None:
    """The whole command, against the embedded engine's chat completions, which refuse tools: all
    of it ends in aborted episodes.
    """
    with serve_in_thread(EmbeddedEngine(tokenizer, echo)) as engine:
        words = f"run desk --baseline-url {engine.url}/v1 --model any --tasks 0-1 --reruns 0"
        done = toolroll(*words.split(), "--out", tmp_path)
    assert done.exit_code == 1, done.output  # nothing was graded
    assert "not trainable" in done.stdout
    assert "WARNING: this is a baseline at an OpenAI-compatible endpoint" in done.stdout
    assert "do not support tools" in next(read_episodes(tmp_path)).result.info["error"]["message"]
    settings = json.loads((tmp_path / "run.json").read_text())["environments"]["desk"]
    assert (settings["agent"], settings["model"]) == ("baseline", "any")
    assert "endpoint" not in settings, "where it is served may change"


# --- doing nothing --------------------------------------------------------------------------------


async def test_doing_nothing() -> None:
    factory = PondFactory(4)
    threads = Threads(2)
    results = [
        await DoNothingAgent(threads).asolve(
            factory.make(EnvironmentOptions()), task=task, max_num_steps=5
        )
        for task in factory.tasks("test")
    ]
    assert [found.reward for found in results] == [1.0, 0.0, 0.0, 0.0], (
        "one pond in four wants no look"
    )
    assert results[0].messages[-1]["content"] == "Goodbye."


async def test_a_reference_played_by_an_endpoint_earns_what_it_earns() -> None:
    desk = find_environment("desk")
    task = desk.tasks("test")[0]
    actions = list(desk.reference(task) or ())

    def reference(body: dict[str, Any]) -> web.Response:
        done = sum(message["role"] == "assistant" for message in body["messages"])
        action = actions[done] if done < len(actions) else Action("Goodbye.")
        calls = [(call.name, json.dumps(call.arguments)) for call in action.tool_calls]
        return web.json_response(completion(action.content, calls))

    threads = Threads(1)
    async with endpoint(reference) as server:
        agent = BaselineAgent(threads, ChatClient(ChatClientConfig(base_url=server.url, model="m")))
        result = await agent.asolve(desk.make(EnvironmentOptions()), task=task)
        await agent.aclose()
    assert (result.reward, result.stop_reason) == (1.0, StopReason.DONE)
