"""A large request is decoded, planned and encoded in a thread: it holds up no other request."""

from __future__ import annotations

import asyncio
import gzip
import threading
from typing import Any

import orjson
import pytest
from support.patience import held
from support.served import CHAT, JSON, TEXT, USER, ServedBench, in_session, numbered, serve, user

from toolroll.endpoint.answers import result
from toolroll.endpoint.conversation.conversation_tree import ConversationTree
from toolroll.endpoint.dialects import openai_chat
from toolroll.endpoint.http import app
from toolroll.endpoint.requests import received
from toolroll.endpoint.sessions.pending import request_key
from toolroll.parsers.formats.hermes import HermesParser
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.render import Renderer

LONG = "word " * 25_000
PATH = in_session(CHAT)
ON_THE_LOOP = threading.main_thread()
Calls = list[tuple[str, bool]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of what may take long, and whether each ran on the event loop."""
    seen: Calls = []

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, threading.current_thread() is ON_THE_LOOP))
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (received, "decode"),
        (received, "_decompressed"),
        (Renderer, "render"),
        (Encoder, "encode"),
        (ConversationTree, "plan"),
        (HermesParser, "parse"),
        (app, "to_json"),
        (app, "traced"),
        (openai_chat, "chat_logprobs"),
        (openai_chat, "text_logprobs"),
    ):
        watch(owner, name)
    return seen


async def post(bench: ServedBench, path: str, body: Any, *, compressed: bool = False) -> Any:
    """Return the status and the answer."""
    data, headers = orjson.dumps(body), JSON
    if compressed:
        data, headers = gzip.compress(data), {**JSON, "Content-Encoding": "gzip"}
    async with bench.http.post(bench.url + path, data=data, headers=headers) as response:
        return response.status, await response.json()


LARGE = (
    (PATH, {"messages": [user(LONG)]}),
    (PATH, {"messages": [USER] * 5000}),
    (TEXT, {"prompt": LONG}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": [user(LONG)]}),
)


@pytest.mark.parametrize("compressed", [False, True])
async def test_nothing_of_a_large_request_runs_on_the_loop(calls: Calls, compressed: bool) -> None:
    settings = {"verify": "off", "max_body": 10_000_000}
    async with serve(context_length=500_000, settings=settings) as bench:
        await bench.ask(USER, session="first")  # what is read of the engine once
        for path, body in LARGE:
            calls.clear()
            status, answer = await post(bench, path, body, compressed=compressed)
            assert status == 200, answer
            expected = {"decode", "encode", *(["_decompressed"] if compressed else [])}
            assert {name for name, _ in calls} >= expected
            assert [name for name, on_the_loop in calls if on_the_loop] == []
        calls.clear()
        bomb = {"messages": [user("a")], "user": " " * 20_000_000}  # small if it is compressed
        status, answer = await post(bench, PATH, bomb, compressed=compressed)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert calls or not compressed
        assert not any(on_the_loop for _, on_the_loop in calls)


@pytest.mark.parametrize(("words", "on_the_loop"), [(10, True), (30_000, False)])
async def test_long_replies_leave_the_loop(calls: Calls, words: int, on_the_loop: bool) -> None:
    async with serve("1 " * words, context_length=500_000) as bench:
        reply = await bench.chat(USER, max_tokens=100_000, tools=[])
        assert reply["content"] == ("1 " * words).strip()
        assert ("parse", on_the_loop) in calls and ("parse", not on_the_loop) not in calls
        calls.clear()
        trajectory = await bench.one_trajectory(turns=1)
        [traced] = (await bench.get("/sessions/s/trace"))["trace"]
        ids = traced["prompt_token_ids"] + traced["completion_token_ids"]
        assert ids == trajectory["input_ids"]
        written = [each for each in calls if each[0] in ("to_json", "traced")]
        assert written == [("to_json", on_the_loop), ("traced", on_the_loop)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("words", "on_the_loop"), [(3, True), (30, False)])
async def test_many_logprobs_are_written_in_a_thread(
    calls: Calls, stream: bool, words: int, on_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result, "LONG", 200)  # instead of 25,000: the test engine streams slowly
    async with serve("1 " * words, context_length=500_000) as bench:
        for path, body, name in (
            (PATH, {"messages": [USER], "logprobs": True}, "chat_logprobs"),
            (TEXT, {"prompt": "Hi", "logprobs": 0}, "text_logprobs"),
        ):
            calls.clear()
            body |= {"max_tokens": 100_000, "stream": stream}
            async with bench.http.post(bench.url + path, json=body) as response:
                assert '"logprobs":{' in await response.text()
            assert [each for each in calls if "logprobs" in each[0]] == [(name, on_the_loop)]


async def test_small_requests_do_not_wait_for_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    large = lambda tree, messages, *rest: len(messages[0]["content"]) > 100_000
    plan, begun, go_on = held(ConversationTree.plan, large)
    monkeypatch.setattr(ConversationTree, "plan", plan)
    async with serve(numbered, context_length=500_000) as bench:
        waiting = asyncio.create_task(bench.ask(user(LONG)))
        await asyncio.to_thread(begun.wait)
        talk = [USER]
        for _ in range(3):
            talk = [*talk, await bench.chat(*talk, tools=[]), USER]
        go_on.set()
        await waiting
        assert sorted(len(each["turns"]) for each in await bench.trajectories()) == [1, 3]


async def test_a_session_deleted_while_its_request_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    key, begun, go_on = held(request_key)
    monkeypatch.setattr("toolroll.endpoint.endpoint.request_key", key)
    async with serve(context_length=500_000) as bench:
        await bench.create()
        waiting = asyncio.create_task(bench.refusal(PATH, {"messages": [user(LONG)]}))
        await asyncio.to_thread(begun.wait)
        assert await bench.delete() == 200
        go_on.set()
        assert (await waiting)[:2] == (409, "request_aborted")
        assert bench.engine.log == []


async def test_one_text_that_is_too_long_is_named() -> None:
    parts = [{"type": "text", "text": "\u00e9" * 2100}]
    tools = [{"function": {"n" * 5000: 1}}]
    async with serve(settings={"max_text": 4096}) as bench:
        for body, param in (
            ({"messages": [user("x" * 5000)]}, "messages[0].content"),
            ({"messages": [{**USER, "content": parts}]}, "messages[0].content[0].text"),
            ({"messages": [USER], "tools": tools}, "tools[0].function." + "n" * 182),
        ):
            assert await bench.refusal(PATH, body) == (413, "text_too_large", param)
        await bench.ask(*[user("x" * 4096)] * 3)
