"""Hostile clients of the endpoint next to good ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.endpoints import Bench, endpoint, judge
from support.faults.clients import BODIES, HALF, RAW, body, post
from support.faults.size import FULL, sampled
from support.faults.tally import Tally
from yarl import URL

from toolroll.testing import PolicyRequest

pytestmark = pytest.mark.faults

SESSIONS, TURNS = (20, 6) if FULL else (8, 4)


def speak(request: PolicyRequest) -> str:
    """Say something that follows from the prompt alone."""
    return f"I have read {len(request.input_ids)} tokens."


async def converse(bench: Bench, session: str) -> list[Any]:
    """Play one good session; return its trajectories."""
    messages: list[Any] = [{"role": "system", "content": f"You are {session}."}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Line {turn} of {session}."})
        status, answer = await bench.post(
            f"/sessions/{session}/v1/chat/completions", {"messages": messages}
        )
        assert status == 200, answer
        messages.append(answer["choices"][0]["message"])
    found = (await bench.get(f"/sessions/{session}/trajectories"))["trajectories"]
    judge(found, bench.engine, session)
    return [
        {key: part[key] for key in ("input_ids", "loss_mask", "logprobs", "fork_reason")}
        for part in found
    ]


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


async def leave_streams(bench: Bench, count: int) -> int:
    """Begin streamed answers and leave."""
    for number in range(count):
        path = f"/sessions/left-{number}/v1/chat/completions"
        await raw(bench, post(body(stream=True), path), leave=True)
    return count


async def race(bench: Bench, count: int) -> int:
    """Send one request and its retries at once; all get the same answer."""
    path = "/sessions/raced/v1/chat/completions"
    sent = {"messages": [{"role": "user", "content": "Hi"}]}
    headers = [{"x-stainless-retry-count": str(n)} for n in range(count)]
    found = await asyncio.gather(*(bench.post(path, sent, **more) for more in headers))
    texts = {answer["choices"][0]["message"]["content"] for _, answer in found}
    assert len(texts) == 1
    return count


async def test_hostile_clients_touch_nobody_else(
    tokenizer: Any, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"good-{number}" for number in range(SESSIONS)]
    async with endpoint(tokenizer, speak) as bench:
        alone = {name: await converse(bench, name) for name in names}
    async with endpoint(tokenizer, speak) as bench:
        good = asyncio.gather(*(converse(bench, name) for name in names))
        (tried, odd), left, raced = await asyncio.gather(
            attack(bench), leave_streams(bench, 20), race(bench, 10)
        )
        found = dict(zip(names, await good, strict=True))
        answers = sum(1 for entry in bench.engine.log if entry.routing_key == "raced")
    tally.tried(tried + left + raced)
    tally.counts["played"] += SESSIONS
    tally.counts["affected"] += sum(1 for name in names if found[name] != alone[name])
    tally.texts(caplog.text, *odd.values())
    tally.check()
    assert odd == {}
    assert answers == 1, "racing retries of one request are one sampled answer"
