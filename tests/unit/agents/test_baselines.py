"""Baselines: a model behind a chat endpoint, not trainable, and what doing nothing scores."""

import json
from typing import Any

import pytest
from pydantic import SecretStr
from support.chat import Seen, completion, endpoint, fails
from support.commands import toolroll
from support.listed_environment import TOOL, ListedWorld
from support.toy_environment import PondFactory

from toolroll import EnvironmentOptions, Episode, InteractionResult, Status, StopReason, Task
from toolroll.agents.chat_client import ChatClient, ChatClientConfig
from toolroll.agents.text_agent import DoNothingAgent
from toolroll.evaluation.do_nothing import play_floor
from toolroll.evaluation.openai_baseline import BaselineAgent, make_baseline
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import from_line, read_episodes, to_line
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.runtime.threads import Threads
from toolroll.testing import EmbeddedEngine, echo, serve_in_thread


async def play(*answers: Any, users: Any = ("Hello.",)) -> tuple[InteractionResult, Any, Seen]:
    """An episode of a baseline whose endpoint gives `answers`: result, world and server."""
    world = ListedWorld(users, ["A frog."])
    async with endpoint(*answers) as server:
        config = ChatClientConfig(
            base_url=server.url,
            model="m",
            api_key=SecretStr("secret-key"),
            retries=2,
            backoff=0.001,
        )
        agent = BaselineAgent(Threads(2), ChatClient(config))
        params = {"temperature": 0.5, "max_new_tokens": 77}
        result = await agent.asolve(world, None, params, task=Task("t", 0), session_id="s")
        await agent.aclose()
    return result, world, server


LOOK = ("look", '{"at": "here"}')


async def test_an_episode() -> None:
    result, world, server = await play(
        completion(None, [LOOK], reasoning_content="hm"),
        completion("<think>a secret</think>\n\nIt is a frog."),
        completion("Bye."),
        users=("Hello.", "Thanks."),
    )
    roles = "system user assistant tool assistant user assistant"
    assert [message["role"] for message in result.messages] == roles.split()
    answer = {"role": "tool", "tool_call_id": "call_0", "name": "look", "content": "A frog."}
    assert result.messages[3] == answer
    spoken = [action.content for action in world.seen]
    assert spoken == ["", "It is a frog.", "Bye."], "thoughts are nobody's business"
    assert (result.status, result.stop_reason) == (Status.COMPLETED, StopReason.DONE)
    assert (result.reward, world.closed, result.trajectories) == (1.0, 1, ())
    assert result.info["trainable"] is False
    names = "turns prompt_tokens completion_tokens cached_tokens executed_calls/look".split()
    assert [result.metrics[name] for name in names] == [3, 27, 12, 15, 1]
    body = server.bodies[1]
    assert all("reasoning_content" not in message for message in body.pop("messages"))
    assert body == {"model": "m", "temperature": 0.5, "max_tokens": 77, "tools": [TOOL]}
    assert server.keys == ["Bearer secret-key"] * 3
    again = from_line(to_line(Episode("pond", "t", 0, 0, 1, result)))
    assert again.result.trajectories == ()


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (("look", '{"at": "he'), "invalid_json", "arguments must be a JSON object"),
        (("look", '"here"'), "bad_arguments", "must be a JSON object, not str"),
        (("look", '{"at": 3}'), "bad_arguments", '3 is not of type "string"'),
        (("jump", "{}"), "unknown_tool", "no tool named 'jump'; the tools are: look"),
    ],
)
async def test_an_invalid_call_is_answered(call: tuple[str, str], kind: str, words: str) -> None:
    result, _, server = await play(completion(None, [call, LOOK]), completion("Bye."))
    assert result.metrics[f"invalid_calls/{kind}"] == 1
    [bad] = result.info["bad_calls"]
    assert (bad["call"], bad["status"]) == (0, kind)
    bad_call = result.messages[bad["message"]]["tool_calls"][bad["call"]]
    assert bad_call["function"]["name"] == call[0]
    answers = [message for message in result.messages if message["role"] == "tool"]
    assert words in answers[0]["content"]
    assert answers[1]["content"] == "A frog.", "the other one was executed"
    sent = [each["function"] for each in server.bodies[1]["messages"][2]["tool_calls"]]
    assert [function["name"] for function in sent] == [call[0], "look"]
    for function in sent:  # servers refuse a history with anything else
        assert isinstance(json.loads(function["arguments"]), dict)
    assert result.reward == 1.0


FAILED, FULL = (StopReason.ENGINE_ERROR, None), (StopReason.CONTEXT_FULL, 0.0)


@pytest.mark.parametrize(
    ("answer", "end", "requests"),
    [
        (fails(400, "bad secret-key"), FAILED, 1),
        (fails(500, "secret-key"), FAILED, 3),
        (fails(200, '{"choices": []}'), FAILED, 3),
        (fails(200, "[1]"), FAILED, 3),
        (fails(400, '{"error": {"code": "context_length_exceeded", "message": "m"}}'), FULL, 1),
        (fails(400, "This model's maximum context length is 9 tokens. However, you"), FULL, 1),
        (completion("It is", finish="length"), (StopReason.LENGTH, 0.0), 1),
    ],
)
async def test_how_it_ends(answer: Any, end: tuple[StopReason, Any], requests: int) -> None:
    result, world, server = await play(answer)
    assert (result.stop_reason, result.reward) == end
    assert (len(server.bodies), world.closed) == (requests, 1)
    assert "secret-key" not in json.dumps(result.info), "the key stands in no error"


async def test_a_refusal_is_a_turn_and_a_parameter_can_be_left_out() -> None:
    result, _, _ = await play(completion(None, refusal="I cannot."))
    assert result.messages[-1]["content"] == "I cannot."
    async with endpoint(completion("Bye.")) as server:
        client = ChatClient(ChatClientConfig(base_url=server.url, model="m"))
        agent = BaselineAgent(Threads(1), client, extra_params=False)
        params = {"top_k": 5, "top_p": 0.5, "sampling_seed": 3}
        await agent.asolve(ListedWorld(["Hello."]), None, params)
        await agent.aclose()
    assert (server.bodies[0]["top_p"], server.bodies[0]["seed"]) == (0.5, 3)
    assert "top_k" not in server.bodies[0]


async def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for given, words in (
        ({"endpoint": "http://x/v1", "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which is not"),
        ({"endpoint": "x/v1"}, "must begin with http"),
    ):
        with pytest.raises(UsageError, match=words):
            make_baseline(Threads(1), {"model": "m", **given})


def test_a_baselines_run(tmp_path: Any, tokenizer: Any) -> None:
    """The whole command; the embedded engine's chat completions refuse tools."""
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


async def test_doing_nothing() -> None:
    factory, agent = PondFactory(4), DoNothingAgent(Threads(2))
    results = [
        await agent.asolve(factory.make(EnvironmentOptions()), task=task, max_num_steps=5)
        for task in factory.tasks("test")
    ]
    rewards = [result.reward for result in results]
    assert rewards == [1.0, 0.0, 0.0, 0.0], "one pond in four wants no look"
    assert results[0].messages[-1]["content"] == "Goodbye."


@pytest.mark.parametrize("name", ["desk", "bfcl/multi_turn_base", "bfcl/multi_turn_miss_func"])
async def test_doing_nothing_earns_no_reward(name: str) -> None:
    factory = find_environment(name)
    tasks = factory.tasks(factory.splits[0])
    played = await play_floor(factory, tasks, max_turns=30)
    assert (played.graded, played.passed) == (len(tasks), 0)
