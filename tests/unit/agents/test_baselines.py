"""The baseline: a model behind a chat endpoint, whose episodes are not trainable."""

import json
from typing import Any

import pytest
from pydantic import SecretStr
from support.chat import Seen, completion, endpoint, fails
from support.commands import toolroll
from support.listed_environment import TOOL, ListedWorld

from toolroll import Episode, InteractionResult, Status, StopReason, Task
from toolroll.agents.chat_client import ChatClient, ChatClientConfig
from toolroll.evaluation.openai_baseline import BaselineAgent
from toolroll.rollout.runs.episode_file import from_line, read_episodes, to_line
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
        (fails(400, '{"error": {"code": "context_length_exceeded", "message": "m"}}'), FULL, 1),
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
