"""`ChatClient` and the agent `baseline` against a real local server with scripted responses."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr
from support.chat import UNFINISHED, Answer, Seen, completion, endpoint, fails
from support.commands import toolroll
from support.listed_environment import TOOL, ListedWorld
from support.loop_clock import skip

from toolroll import Episode, InteractionResult, Status, StopReason, Task
from toolroll.agents.chat_client import ChatClient, ChatClientConfig, ChatCompletion
from toolroll.evaluation.openai_baseline import BaselineAgent
from toolroll.rollout.errors import ContextOverflowError, EngineError, UsageError
from toolroll.rollout.runs.episode_file import from_line, read_episodes, to_line
from toolroll.rollout.runtime.threads import Threads
from toolroll.testing import EmbeddedEngine, echo, serve_in_thread

KEY = "sk-a-key-that-nobody-may-see"
RETRIED = [408, 425, 429, 500, 502, 503, 504, 507, 529]
REQUEST = {"messages": [{"role": "user", "content": "Hello."}]}


class Scripted:
    """A client, what its server saw, and how long it paused."""

    def __init__(self, server: Seen, **fields: Any) -> None:
        self.server = server
        self.pauses: list[float] = []
        config = {"base_url": f"{server.url}/", "model": "m", "backoff": 1.0, **fields}
        self.client = ChatClient(ChatClientConfig(**config), sleep=self._sleep, jitter=lambda: 1.0)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def complete(self, **options: Any) -> ChatCompletion:
        return await self.client.complete(REQUEST, **options)

    async def fail(self) -> EngineError:
        with pytest.raises(EngineError) as caught:
            await self.complete()
        return caught.value


@asynccontextmanager
async def scripted(*answers: Answer | dict[str, Any], **fields: Any) -> AsyncIterator[Scripted]:
    async with endpoint(*answers) as server:
        talk = Scripted(server, **fields)
        try:
            yield talk
        finally:
            await talk.client.aclose()


async def test_a_completion() -> None:
    answer = completion(None, [("look", "{}")], reasoning_content="hm")
    async with scripted(answer, api_key=KEY) as talk:
        done = await talk.complete()
    assert [(call.name, call.arguments) for call in done.reply.tool_calls] == [("look", {})]
    assert (done.reply.reasoning, done.finish_reason, done.attempts) == ("hm", "tool_calls", 1)
    assert done.usage == {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 5}
    assert talk.server.bodies == [{"model": "m", **REQUEST}]
    assert talk.server.keys == [f"Bearer {KEY}"]


async def takes_ten_minutes(body: dict[str, Any]) -> web.Response:
    skip(600)
    return await asyncio.Future[web.Response]()


def choice(message: str, finish: str = "stop", more: str = "") -> Answer:
    return fails(
        200, f'{{"choices": [{{"message": {message}, "finish_reason": "{finish}"}}]{more}}}'
    )


UNREADABLE = "the response is not a chat completion"
NONE = "the response has no choices"
DEEP = '{"a":' * 1010 + "1" + "}" * 1010


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        *((fails(status), f"HTTP {status}: no") for status in RETRIED),
        (fails(500, "x" * 9000), "HTTP 500: x"),
        (fails(500, ""), "HTTP 500"),
        (takes_ten_minutes, "no answer in time"),
        (fails(200, "{"), UNREADABLE),
        (choice('{"content": 5}'), UNREADABLE),
        (choice('{"content": "hi"}', more=', "usage": {"prompt_tokens": "many"}'), UNREADABLE),
        (choice(f'{{"content": "hi", "tool_calls": [{{"function": {{"arguments": {DEEP}}}}}]}}'),
         UNREADABLE),
        (fails(200, "{}"), f"{NONE}: {{}}"),
        (fails(200, '{"choices": []}'), NONE),
        (fails(200, '{"error": {"message": "no credits", "code": 402}}'), f"{NONE}: no credits"),
        (fails(200, '{"detail": "loading"}'), NONE + ': {"detail":"loading"}'),
        (fails(200, '{"choices": [{"message": {"content": ""}, "finish_reason": "error", '
               '"error": {"message": "provider is down"}}]}'),
         "finish_reason 'error'): provider is down"),
        (fails(200, '{"choices": [{"delta": {"content": "hi"}, "finish_reason": null}]}'),
         "the answer is unfinished (finish_reason None)"),
        *((choice('{"content": "hi"}', end), f"finish_reason {end!r}") for end in UNFINISHED[:4]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
async def test_what_can_succeed_is_retried(answer: Answer, words: str) -> None:
    """In the end, the error has the server's words. The pauses between attempts double."""
    async with scripted(answer, answer, completion("hi"), timeout=599) as talk:
        done = await talk.complete()
    assert (done.reply.content, done.attempts, talk.pauses) == ("hi", 3, [1.0, 2.0])
    async with scripted(answer, timeout=599, retries=1) as talk:
        error = await talk.fail()
    assert re.search(f"after 2 attempts: .*{re.escape(words)}", str(error))
    assert len(talk.server.bodies) == 2 and len(str(error)) < 2500
    async with scripted(answer, timeout=599, retries=0) as talk:
        error = await talk.fail()
    assert "after 1 attempt: " in str(error) and not str(error).endswith(": ")


@pytest.mark.parametrize("status", [301, 307, 400, 401, 404, 422, 501, 505])
async def test_what_cannot_succeed_is_not_retried(status: int) -> None:
    location = {"Location": "/v1/chat/completions"} if status < 400 else {}
    async with scripted(fails(status, f"key {KEY} is wrong", **location), api_key=KEY) as talk:
        error = await talk.fail()
    assert str(error) == (
        f"{talk.server.url}/chat/completions failed after 1 attempt: "
        f"HTTP {status}: key *** is wrong"
    )
    assert (error.status, error.attempts, talk.pauses) == (status, 1, [])
    assert len(talk.server.bodies) == 1


async def test_retry_after_is_respected() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=29), usegmt=True)
    answers = (
        fails(429, Retry_After="7"),
        fails(503, Retry_After=soon),
        fails(503, Retry_After="later"),
        completion("hi"),
    )
    async with scripted(*answers) as talk:
        assert (await talk.complete()).attempts == 4
    seven, date, unreadable = talk.pauses
    assert (seven, 4 < date <= 29, unreadable) == (7, True, 4)
    async with scripted(fails(429, Retry_After="3600")) as talk:
        assert "Retry-After is 3600 s, longer than max_backoff" in str(await talk.fail())
    assert talk.pauses == []


@pytest.mark.parametrize(
    "text",
    [
        '{"error": {"code": "context_length_exceeded", "message": "too long"}}',
        "This model's maximum context length is 9 tokens. However, you requested 10 tokens.",
        "The decoder prompt (length 10) is longer than the maximum model length of 9.",
        "The input (10 tokens) is longer than the model's context length (9 tokens).",
    ],
)
async def test_a_prompt_that_is_too_long_is_the_models_error(text: str) -> None:
    async with scripted(fails(400, text)) as talk:
        with pytest.raises(ContextOverflowError):
            await talk.complete()
    assert len(talk.server.bodies) == 1
    async with scripted(fails(500, text), retries=1) as talk:
        error = await talk.fail()
    assert not isinstance(error, ContextOverflowError), "a 500 says nothing of the model"


async def test_a_truncated_answer_gets_more_room_if_it_fits() -> None:
    """Without a limit in the request, the server's own is the number of tokens it sampled."""
    cut = completion("hal", finish="length")
    async with scripted(cut, completion("half")) as talk:
        assert (await talk.complete()).reply.content == "half"
    assert [body.get("max_tokens") for body in talk.server.bodies] == [None, 8]
    async with scripted(cut) as talk:
        done = await talk.complete(allow_length=True)
    assert (done.reply.content, done.finish_reason, done.attempts) == ("hal", "length", 1)
    refused = fails(400, "This model's maximum context length is 4096 tokens")
    async with scripted(cut, refused) as talk:
        with pytest.raises(EngineError, match="2 attempts: the token limit truncated") as caught:
            await talk.client.complete(REQUEST | {"max_tokens": 2048})
    assert not isinstance(caught.value, ContextOverflowError)
    assert [body["max_tokens"] for body in talk.server.bodies] == [2048, 4096]


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_no_part_of_the_key_is_left_where_a_body_is_cut(status: int) -> None:
    for before in range(480, 500):
        text = "x" * before + KEY + "x" * 5000
        async with scripted(fails(status, text), api_key=KEY, retries=0) as talk:
            error = await talk.fail()
        assert KEY[:3] not in f"{error} {error.body}"
        assert "xx" in error.body


async def test_a_key_in_a_reply_or_with_a_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(completion("a bird"), api_key="a") as talk:
        assert (await talk.complete()).reply.content == "a bird"
    # As one that was read from a file into the variable; a header could not hold it
    monkeypatch.setenv("A_KEY_FOR_TESTS", f"{KEY}\n")
    config = ChatClientConfig(base_url="http://h/v1", model="m", api_key_env="A_KEY_FOR_TESTS")
    assert config.key() == KEY
    missing = ChatClientConfig(base_url="http://h/v1", model="m", api_key_env="NO_SUCH_KEY")
    with pytest.raises(UsageError, match="NO_SUCH_KEY, which is not set"):
        missing.key()
    assert KEY not in repr(ChatClientConfig(base_url="http://h", model="m", api_key=SecretStr(KEY)))


async def test_connections_are_opened_anew_or_named_as_missing() -> None:
    async with scripted(completion("hi")) as talk:
        await talk.client.aclose()
        await talk.complete()
        await talk.client.aclose()
        assert (await talk.complete()).reply.content == "hi"
    gone = Scripted(talk.server, retries=1)
    assert "2 attempts: no connection to 127.0.0.1:" in str(await gone.fail())
    await gone.client.aclose()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_url": "h:1"}, "base_url: must begin with http"),
        ({"base_url": f"ftp://me:{KEY}@h/v1"}, "base_url: must begin with http"),
        ({"api_key": KEY, "api_key_env": "b"}, "give api_key or api_key_env, not both"),
    ],
)
def test_a_wrong_config_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        ChatClientConfig.checked("here", {"base_url": "http://h/v1", "model": "m", **fields})
    assert str(caught.value).startswith(f"here: {words}")
    assert KEY not in f"{caught.value} {caught.value.__cause__}"


# --- the baseline agent, whose model is behind such an endpoint -----------------------------------


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


async def test_an_episode_of_the_baseline() -> None:
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
async def test_how_a_baselines_episode_ends(
    answer: Any, end: tuple[StopReason, Any], requests: int
) -> None:
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
