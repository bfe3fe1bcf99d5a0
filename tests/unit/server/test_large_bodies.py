"""A large request is decoded, planned and encoded in a thread: it holds up no other request."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from support.endpoints import Bench, endpoint

from toolroll.endpoint.answers import result
from toolroll.endpoint.conversation.conversation_tree import ConversationTree
from toolroll.endpoint.dialects import openai_chat
from toolroll.endpoint.http import app
from toolroll.endpoint.requests import received
from toolroll.endpoint.sessions.pending import request_key
from toolroll.parsers.formats.hermes import HermesParser
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.render import Renderer
from toolroll.testing import Fault

LONG = "word " * 25_000
CHAT = "/sessions/s/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
USER: Any = {"role": "user", "content": LONG}
ON_THE_LOOP: Any = threading.main_thread()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Which calls ran, and in which thread."""
    seen: list[tuple[str, Any]] = []

    def watched(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, threading.current_thread()))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (received, "decode"),
        (received, "_decompressed"),
        (Renderer, "render"),
        (Encoder, "encode"),
        (ConversationTree, "plan"),
        (HermesParser, "parse"),
    ):
        watched(owner, name)
    return seen


async def post(bench: Bench, path: str, body: Any, *, compressed: bool = False) -> tuple[int, Any]:
    data = orjson.dumps(body)
    headers = {**JSON, "Content-Encoding": "gzip"} if compressed else JSON
    async with bench.http.post(
        bench.url + path, data=gzip.compress(data) if compressed else data, headers=headers
    ) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER]}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}] * 5000}),
        ("/v1/completions", {"prompt": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [USER]}),
    ],
)
async def test_nothing_of_a_large_request_runs_on_the_loop(
    tokenizer: Any, places: list[tuple[str, Any]], path: str, body: Any, compressed: bool
) -> None:
    async with endpoint(
        tokenizer, lambda request: "Hello.", context_length=500_000, settings={"verify": "off"}
    ) as bench:
        # what is asked once
        assert (await bench.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}))[0] == 200
        places.clear()
        status, answer = await post(bench, path, body, compressed=compressed)
        assert status == 200, answer
        assert {name for name, _ in places} >= {"decode", "encode"} | (
            {"_decompressed"} if compressed else set()
        )
        assert [name for name, thread in places if thread is ON_THE_LOOP] == []


async def test_a_long_reply_is_read_in_a_thread_too(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    parse = HermesParser.parse

    def watched(self: Any, text: str, **given: Any) -> Any:
        seen.append(threading.current_thread())
        return parse(self, text, **given)

    monkeypatch.setattr(HermesParser, "parse", watched)
    said = {"short": "Hello.", "long": "1 " * 30_000}
    async with endpoint(
        tokenizer, lambda request: said[request.routing_key], context_length=500_000
    ) as bench:
        for name in said:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000}
            status, answer = await bench.post(f"/sessions/{name}/v1/chat/completions", body)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, said[name].strip())
        assert [thread is ON_THE_LOOP for thread in seen] == [True, False]


async def test_a_small_body_that_decompresses_to_a_large_one_too(
    tokenizer: Any, places: list[tuple[str, Any]]
) -> None:
    async with endpoint(
        tokenizer, lambda request: "Hello.", settings={"max_body": 10_000_000}
    ) as bench:
        places.clear()
        bomb = {"messages": [{"role": "user", "content": "a"}], "user": " " * 20_000_000}
        status, answer = await post(bench, CHAT, bomb, compressed=True)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert places and all(thread is not ON_THE_LOOP for _, thread in places)


async def test_small_requests_are_answered_while_a_large_one_is_planned(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    plan = ConversationTree.plan

    def slow(self: Any, messages: Any, *rest: Any) -> Any:
        if len(messages[0]["content"]) > 100_000:
            begun.set()
            assert go_on.wait(60)
        return plan(self, messages, *rest)

    monkeypatch.setattr(ConversationTree, "plan", slow)
    async with endpoint(
        tokenizer, lambda request: f"Reply {request.index}.", context_length=500_000
    ) as bench:
        large = asyncio.create_task(bench.post(CHAT, {"messages": [USER]}))
        await asyncio.to_thread(begun.wait)
        talk = [{"role": "user", "content": "Hi"}]
        for _ in range(3):
            status, answer = await bench.post(CHAT, {"messages": talk})
            assert status == 200
            talk = [*talk, answer["choices"][0]["message"], {"role": "user", "content": "Go on"}]
        go_on.set()
        assert (await large)[0] == 200
        trajectories = await bench.trajectories()
        assert sorted(len(found["turns"]) for found in trajectories) == [1, 3]


async def test_a_session_deleted_while_its_request_is_read_answers_nothing(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(kind: str, body: Any) -> bytes:
        begun.set()
        assert go_on.wait(60)
        return request_key(kind, body)

    monkeypatch.setattr("toolroll.endpoint.endpoint.request_key", slow)
    async with endpoint(tokenizer, lambda request: "Hello.", context_length=500_000) as bench:
        assert (await bench.post("/sessions", {"session_id": "s"}))[0] == 201
        large = asyncio.create_task(bench.post(CHAT, {"messages": [USER]}))
        await asyncio.to_thread(begun.wait)
        async with bench.http.delete(f"{bench.url}/sessions/s") as response:
            assert response.status == 200
        go_on.set()
        status, answer = await large
        assert (status, answer["error"]["code"]) == (409, "request_aborted")
        assert bench.engine.log == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "\u00e9" * 2100}]}
                ]
            },
            "messages[0].content[0].text",
        ),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"function": {"n" * 5000: 1}}],
            },
            "tools[0].function." + "n" * 182,
        ),
    ],
)
async def test_one_text_that_is_too_long_is_named(tokenizer: Any, body: Any, param: str) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.", settings={"max_text": 4096}) as bench:
        status, answer = await bench.post(CHAT, body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (
            413,
            "text_too_large",
            param,
        )
        many = {"messages": [{"role": "user", "content": "x" * 4096}] * 3}
        assert (await bench.post(CHAT, many))[0] == 200


async def test_a_request_that_fails_is_not_kept(tokenizer: Any) -> None:
    """Its error would hold its whole conversation for the grace time, and no retry joins it."""
    async with endpoint(
        tokenizer, lambda request: "Hello.", faults=lambda request: Fault(status=400, body=b"{}")
    ) as bench:
        await bench.post("/sessions", {"session_id": "s"})
        short = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await bench.post(CHAT, short))[0] == 400
        assert bench.endpoint.sessions.find("s").pending.all() == []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Which parts of answers were made, and whether that was on the event loop."""
    seen: list[tuple[str, bool]] = []

    def watched(owner: Any, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, threading.current_thread() is ON_THE_LOOP))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, property(call) if isinstance(owner, type) else call)
        return call

    watched(app, "to_json", app.to_json)  # type: ignore[attr-defined]
    watched(app, "traced", app.traced)  # type: ignore[attr-defined]
    for owner, name in (
        (openai_chat, "chat_logprobs"),
        (openai_chat, "text_logprobs"),
    ):
        watched(owner, name, getattr(owner, name))
    return seen


@pytest.mark.parametrize(("words", "on_the_loop"), [(10, True), (30_000, False)])
async def test_what_a_long_session_came_to_is_written_in_a_thread(
    tokenizer: Any, written: list[tuple[str, bool]], words: int, on_the_loop: bool
) -> None:
    async with endpoint(tokenizer, lambda request: "1 " * words, context_length=500_000) as bench:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000}
        assert (await bench.post(CHAT, body))[0] == 200
        [trajectory] = await bench.trajectories()
        [traced] = (await bench.get("/sessions/s/trace"))["trace"]
        assert (
            traced["prompt_token_ids"] + traced["completion_token_ids"] == trajectory["input_ids"]
        )
        assert written == [("to_json", on_the_loop), ("traced", on_the_loop)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "logprobs"), [(CHAT, True), ("/sessions/s/v1/completions", 0)])
@pytest.mark.parametrize(("words", "on_the_loop"), [(3, True), (30, False)])
async def test_many_logprobs_are_written_in_a_thread(
    tokenizer: Any,
    written: list[tuple[str, bool]],
    path: str,
    logprobs: Any,
    stream: bool,
    words: int,
    on_the_loop: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(result, "LONG", 200)  # instead of 25,000: the test engine streams slowly
    async with endpoint(tokenizer, lambda request: "1 " * words, context_length=500_000) as bench:
        asked = (
            {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
        )
        body = {**asked, "max_tokens": 100_000, "logprobs": logprobs, "stream": stream}
        async with bench.http.post(bench.url + path, json=body) as response:
            text = await response.text()
        assert response.status == 200 and '"logprobs":{' in text
        assert written == [("chat_logprobs" if path == CHAT else "text_logprobs", on_the_loop)]
