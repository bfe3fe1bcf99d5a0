"""A large request is decoded, planned and encoded in a thread: it holds up no other request. JSON
that is nested deep, in requests and in what the model says, is refused in the dialect's form, or
served as text, and never fails the endpoint.
"""

import asyncio
import gzip
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.anthropic_wire import HELLO, LOOK
from support.client_fields import FIELDS, HOLE
from support.dialect_bodies import PATHS, body_of
from support.patience import held
from support.served import CHAT, JSON, MESSAGES, TEXT, USER, ServedBench, in_session, serve, user
from support.wires import ask, continued

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
    replies = [f"Reply {number}." for number in range(4)]
    plan, begun, go_on = held(ConversationTree.plan, large)
    monkeypatch.setattr(ConversationTree, "plan", plan)
    async with serve(replies, context_length=500_000) as bench:
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


DEPTHS = (100, *range(193, 202), *range(245, 256), 1000, 1030, 50_000)


def nested(depth: int) -> str:
    """A JSON object that is nested `depth` levels."""
    return '{"a":' + "[" * (depth - 1) + '"bottom"' + "]" * (depth - 1) + "}"


async def post_nested(
    bench: ServedBench, path: str, body: dict[str, Any], depth: int, *, text: bool = False
) -> tuple[int, str]:
    """Send `body` with JSON of this depth in its hole, as JSON or as text."""
    filling = json.dumps(nested(depth)) if text else nested(depth)
    data = json.dumps(body).replace(json.dumps(HOLE), filling).encode()
    async with bench.http.post(bench.url + path, data=data, headers=JSON) as response:
        return response.status, await response.text()


def history(arguments: str) -> list[dict[str, Any]]:
    calls = [{"id": "c", "function": {"name": "look", "arguments": arguments}}]
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    return [{"role": "system", "content": "S"}, USER, reply, result]


OF_CHAT = body_of("chat", history(HOLE), stream=False)
OF_MESSAGES = body_of("messages", history("{}"), stream=False)
OF_MESSAGES["messages"][1]["content"][0]["input"] = HOLE
OF_RESPONSES = body_of("responses", history(HOLE), stream=False)
INPUTS = {
    "chat, as JSON": (CHAT, OF_CHAT, False),
    "chat, as text": (CHAT, OF_CHAT, True),
    "messages": (MESSAGES, OF_MESSAGES, False),
    "messages, counted": (f"{MESSAGES}/count_tokens", OF_MESSAGES, False),
    "responses": (PATHS["responses"], OF_RESPONSES, True),
}
"""A path, a body with a hole for arguments, and whether what fills the hole is text."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", INPUTS)
async def test_arguments_of_any_depth_are_shown_or_refused(name: str, stream: bool) -> None:
    path, body, text = INPUTS[name]
    async with serve() as bench:
        for depth in DEPTHS:
            served = len(bench.engine.log)
            body = {**body, "stream": stream and not path.endswith("count_tokens")}
            status, answer = await post_nested(bench, in_session(path), body, depth, text=text)
            if status == 200:
                assert "error" not in answer or '"error":null' in answer, answer
                for request in range(served, len(bench.engine.log)):
                    assert "bottom" in bench.prompt(request)
                continue
            assert status == 400 and depth >= 180, (depth, answer)
            first = answer.partition("data: ")[2].partition("\n")[0] or answer
            assert ("type" in json.loads(first)) == path.startswith(MESSAGES)


@pytest.mark.parametrize(
    ("depth", "stream"),
    [*itertools.product((100, 195, 196, 201, 248, 253), (False, True)), (1030, False)],
)
async def test_deep_arguments_of_the_model_come_back_unchanged(depth: int, stream: bool) -> None:
    reply = f'<tool_call>{{"name": "look", "arguments": {nested(depth)}}}</tool_call>'
    body = {**HELLO, "max_tokens": 30_000, "tools": [LOOK]}
    async with serve([reply, "Done."]) as bench:
        first = await ask(bench, body, stream=stream)
        await ask(bench, continued(body, first), stream=stream)
        await bench.one_trajectory(turns=2)


@pytest.mark.parametrize("depth", [193, 195, 197, 199])
async def test_no_part_of_a_body_fails_the_endpoint(depth: int, tmp_path: Path) -> None:
    async with serve(out=tmp_path, settings={"verify": "off"}) as bench:
        await bench.create("s0")
        for path, body in FIELDS.values():
            status, answer = await post_nested(bench, path.format("s0"), body, depth)
            assert status in (200, 201, 400, 404), answer
            assert "internal_error" not in answer, body
