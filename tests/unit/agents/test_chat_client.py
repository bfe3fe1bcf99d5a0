"""`ChatClient` against a real local server with scripted responses."""

import asyncio
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
from support.loop_clock import skip

from toolroll.agents.chat_client import ChatClient, ChatClientConfig, ChatCompletion
from toolroll.rollout.errors import ContextOverflowError, EngineError, UsageError

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
