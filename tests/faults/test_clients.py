"""Hostile clients of the endpoint next to good ones."""

import asyncio
import gzip
import zlib
from typing import Any

import orjson
import pytest
from support.endpoints import Bench, endpoint
from support.faults.size import FULL, sampled
from support.faults.tally import Tally
from support.listed_environment import LOOK
from yarl import URL

from toolroll.testing import echo

pytestmark = pytest.mark.faults

SESSIONS, TURNS = (20, 6) if FULL else (8, 4)
LEFT, RACED = 20, 10
"""Streams whose client leaves, and requests with one answer."""
USER = {"role": "user", "content": "Hi"}
CHAT = "/sessions/bad/v1/chat/completions"


def body(**fields: Any) -> bytes:
    return orjson.dumps({"messages": [USER], **fields}, option=orjson.OPT_NON_STR_KEYS)


def messages(*found: Any) -> bytes:
    return body(messages=list(found))


def saying(content: Any) -> bytes:
    return messages({"role": "user", "content": content})


def calling(call: Any) -> bytes:
    return messages(USER, {"role": "assistant", "tool_calls": [call]}, USER)


def post(payload: bytes, path: str = CHAT, *headers: str) -> bytes:
    """Return the bytes of a POST request; `headers` replace Content-Length and Content-Type."""
    own = headers or (f"Content-Length: {len(payload)}", "Content-Type: application/json")
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *own, "Connection: close"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + payload


BODIES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "null": b"null",
    "a list": b"[]",
    "a number": b"5",
    "a string": b'"x"',
    "NaN": b'{"messages": [], "temperature": NaN}',
    "nested": b"[" * 100_000,
    "no messages": b"{}",
    "messages null": body(messages=None),
    "messages empty": body(messages=[]),
    "messages a string": body(messages="Hi"),
    "messages an object": body(messages={"role": "user"}),
    "a message null": messages(None),
    "a message a string": messages("Hi"),
    "no role": messages({"content": "Hi"}),
    "an unknown role": messages({"role": "alien", "content": "Hi"}),
    "role a list": messages({"role": ["user"], "content": "Hi"}),
    "content a number": saying(5),
    "content an object": saying({"text": "Hi"}),
    "a part null": saying([None]),
    "a part without a type": saying([{"text": "Hi"}]),
    "an image": saying([{"type": "image_url", "image_url": {"url": "x"}}]),
    "a tool result of no call": messages(
        USER, {"role": "tool", "tool_call_id": "no", "content": "x"}
    ),
    "calls a string": messages(USER, {"role": "assistant", "content": None, "tool_calls": "look"}),
    "a call null": calling(None),
    "a call without a function": calling({"id": "1"}),
    "arguments a number": calling({"id": "1", "function": {"name": "look", "arguments": 5}}),
    "tools a string": body(tools="look"),
    "a tool null": body(tools=[None]),
    "a tool without a function": body(tools=[{"type": "function"}]),
    "a tool's schema a string": body(
        tools=[{"type": "function", "function": {"name": "x", "parameters": "y"}}]
    ),
    "tool_choice unknown": body(tools=[LOOK], tool_choice="sometimes"),
    "tool_choice of no tool": body(
        tools=[LOOK], tool_choice={"type": "function", "function": {"name": "no"}}
    ),
    "temperature a string": body(temperature="hot"),
    "temperature below zero": body(temperature=-1),
    "temperature huge": body(temperature=1e30),
    "top_p above one": body(top_p=2),
    "n zero": body(n=0),
    "n huge": body(n=10**9),
    "max_tokens zero": body(max_tokens=0),
    "max_tokens below zero": body(max_tokens=-5),
    "max_tokens a string": body(max_tokens="many"),
    "stop a number": body(stop=5),
    "stop with null": body(stop=[None]),
    "logit_bias outside": body(logit_bias={"99999999": 1}),
    "stream a string": body(stream="yes"),
    "top_logprobs huge": body(logprobs=True, top_logprobs=10**6),
    "response_format unknown": body(response_format={"type": "alien"}),
    "an unknown field": body(alien=1),
    "a session id that is no id": body(session_id="../x"),
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a huge number": b'{"messages": [{"role": "user", "content": "Hi"}], "seed": 1'
    + b"0" * 5000
    + b"}",
}
"""Bodies of chat requests that are wrong, or right and odd."""

JSON, FOREIGN = "Content-Type: application/json", "Origin: https://evil.example"


def packed(payload: bytes, how: str) -> bytes:
    return post(payload, CHAT, f"Content-Length: {len(payload)}", f"Content-Encoding: {how}", JSON)


RAW: dict[str, bytes] = {
    "nothing": b"",
    "garbage": b"\x00\x01\x02\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "half a request line": b"POST /sess",
    "half a header": b"POST / HTTP/1.1\r\nHost: 12",
    "half a body": post(b'{"messages"', CHAT, "Content-Length: 1000", JSON),
    "a body longer than it says": post(body(), CHAT, "Content-Length: 5", JSON),
    "a length below zero": post(body(), CHAT, "Content-Length: -5"),
    "a length that is no number": post(body(), CHAT, "Content-Length: x"),
    "two lengths": post(body(), CHAT, "Content-Length: 5", "Content-Length: 6"),
    "a length and chunks": post(body(), CHAT, "Content-Length: 5", "Transfer-Encoding: chunked"),
    "a chunk without a size": post(b"x\r\n", CHAT, "Transfer-Encoding: chunked"),
    "huge headers": post(b"", CHAT, "X-Long: " + "x" * 1_000_000),
    "many headers": post(b"", CHAT, *[f"X-{n}: x" for n in range(20_000)]),
    "false gzip": packed(b"x" * 20, "gzip"),
    "cut gzip": packed(gzip.compress(body())[:30], "gzip"),
    "a bomb": packed(zlib.compress(b" " * 300_000_000, 9), "deflate"),
    "a key that is not ASCII": post(b"", CHAT, "Content-Length: 0", "Authorization: Bearer \xff"),
    "an unknown route": post(b"", "/v1/responses"),
    "a path with dots": post(b"", "/sessions/../../etc/passwd"),
    "a path with NUL": post(b"", "/sessions/a%00b/v1/chat/completions"),
    "an unknown method": b"BREW / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a foreign origin": post(
        body(), CHAT, FOREIGN, f"Content-Length: {len(body())}", "Content-Type: text/plain"
    ),
    "an upgrade": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: "
    b"upgrade\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "pipelined": post(b"", "/health") + post(body()),
}
"""Whole requests that no honest client sends."""

HALF = ("nothing", "half a request line", "half a header", "half a body", "an upgrade")
"""Those of `RAW` that a server may wait for the rest of."""


async def converse(bench: Bench, session: str) -> list[Any]:
    """Play one good session; return its trajectories."""
    talk: list[Any] = [{"role": "system", "content": f"You are {session}."}]
    for turn in range(TURNS):
        talk.append({"role": "user", "content": f"Line {turn} of {session}."})
        status, answer = await bench.post(CHAT.replace("bad", session), {"messages": talk})
        assert status == 200, answer
        talk.append(answer["choices"][0]["message"])
    kept = ("input_ids", "loss_mask", "logprobs", "fork_reason")
    return [{key: part[key] for key in kept} for part in await bench.trajectories(session)]


async def raw(bench: Bench, sent: bytes, *, leave: bool = False, end: bool = False) -> bytes:
    """Send bytes; return what comes until the server closes, or leave at once.

    `end`: say that no more is sent; without it the server would wait for the rest of a half
    request.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(bench.url).port)
    try:
        writer.write(sent)
        if leave:
            return b""
        if end:
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def attack(bench: Bench) -> tuple[int, dict[str, str]]:
    """Send what is hostile, once; return how much that was, and the answers that are not to be."""
    tried, odd = 0, {}
    sent = {**{f"body: {name}": post(data) for name, data in BODIES.items()}, **RAW}
    for name, data in sampled(sent.items(), 40):
        for leave in (False, True):
            answer = await raw(bench, data, leave=leave, end=name in HALF)
            tried += 1
            head = answer.split(b"\r\n", 1)[0]
            if head.startswith(b"HTTP/1.1 5") or b"Traceback" in answer:
                odd[name] = answer[:500].decode("latin-1")
    return tried, odd


async def leave_streams(bench: Bench) -> None:
    """Begin streamed answers and leave."""
    for number in range(LEFT):
        path = CHAT.replace("bad", f"left-{number}")
        await raw(bench, post(body(stream=True), path), leave=True)


async def race(bench: Bench) -> None:
    """Send one request and its retries at once; all get the same answer."""
    path, sent = CHAT.replace("bad", "raced"), {"messages": [USER]}
    headers = [{"x-stainless-retry-count": str(n)} for n in range(RACED)]
    found = await asyncio.gather(*(bench.post(path, sent, **more) for more in headers))
    texts = {answer["choices"][0]["message"]["content"] for _, answer in found}
    assert len(texts) == 1


async def test_hostile_clients_touch_nobody_else(
    tokenizer: Any, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"good-{number}" for number in range(SESSIONS)]
    async with endpoint(tokenizer, echo) as bench:
        alone = {name: await converse(bench, name) for name in names}
    async with endpoint(tokenizer, echo) as bench:
        good = asyncio.gather(*(converse(bench, name) for name in names))
        (tried, odd), _, _ = await asyncio.gather(attack(bench), leave_streams(bench), race(bench))
        found = dict(zip(names, await good, strict=True))
        answers = sum(1 for entry in bench.engine.log if entry.routing_key == "raced")
    tally.tried(tried + LEFT + RACED)
    tally.counts["played"] += SESSIONS
    tally.counts["affected"] += sum(1 for name in names if found[name] != alone[name])
    tally.texts(caplog.text, *odd.values())
    tally.check()
    assert odd == {}
    assert answers == 1, "racing retries of one request are one sampled answer"
