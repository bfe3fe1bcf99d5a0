"""`Engine`: what it tries again, how often and when, and the words of what it gives up on."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from support.client import Pauses, answering, client, flaky, refusal, request
from support.http import completion, says

from toolroll.rollout.errors import ContextOverflowError, EngineError
from toolroll.testing import EmbeddedEngine, Reply


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
async def test_what_can_succeed_is_tried_again(status: int) -> None:
    seen, handle = flaky(refusal(status, {"message": "busy"}), refusal(status), completion([3]))
    pauses = Pauses()
    async with answering(handle, sleep=pauses, backoff=0.5) as calls:
        answer = await calls.generate(request())
    assert answer.attempts == 3 and answer.output_ids.tolist() == [3]
    assert len({body["rid"] for body in seen}) == 3
    assert [{**body, "rid": ""} for body in seen] == [{**seen[0], "rid": ""}] * 3
    assert 0.25 <= pauses[0] <= 0.75 and 0.5 <= pauses[1] <= 1.5


async def test_the_pauses_grow_to_a_limit_and_are_jittered() -> None:
    pauses = Pauses()
    config: Any = {"retries": 7, "backoff": 1.0, "max_backoff": 4.0}
    async with answering(says({"message": "full"}, status=503), sleep=pauses, **config) as calls:
        with pytest.raises(EngineError, match="full after 8 attempts") as raised:
            await calls.generate(request())
    assert (raised.value.status, raised.value.attempts) == (503, 8)
    assert len(pauses) == 7
    for pause, middle in zip(pauses, [1, 2, 4, 4, 4, 4, 4], strict=True):
        assert middle * 0.5 <= pause <= middle * 1.5
    assert len(set(pauses)) == 7


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("7", 7.0, 7.0), ("9999", 60.0, 60.0), ("soon", 0.0, 0.4), ("-3", 0.0, 0.4)],
)
async def test_retry_after_is_waited(header: str, least: float, most: float, status: int) -> None:
    _, handle = flaky(refusal(status, {}, **{"Retry-After": header}), completion([3]))
    pauses = Pauses()
    async with answering(handle, sleep=pauses, backoff=0.25) as calls:
        await calls.generate(request())
    assert len(pauses) == 1 and least <= pauses[0] <= most


async def test_an_internal_error_gets_one_more_attempt_only() -> None:
    seen, handle = flaky(refusal(500, b"Internal Server Error"))
    async with answering(handle, retries=5) as calls:
        with pytest.raises(EngineError, match="Internal Server Error after 2 attempts"):
            await calls.generate(request())
    assert len(seen) == 2


async def test_the_deadline_ends_the_attempts() -> None:
    seen, handle = flaky(refusal(503, {"message": "full"}))
    async with answering(handle, deadline=5.0, backoff=100.0, max_backoff=100.0) as calls:
        with pytest.raises(EngineError, match="full"):
            await calls.generate(request())
    assert len(seen) == 1


OVERFLOWS = (
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
    "requested a total of 4103 tokens: 4095 tokens from the input messages and 8 tokens for the "
    "completion.",
    "Input length (3000 tokens) exceeds the maximum allowed length (2994 tokens). Use a shorter "
    "input or enable --allow-auto-truncate.",
)
FLAT = {"object": "error", "message": "1 validation error: x", "type": "Bad Request", "code": 400}
FOUR_HUNDREDS: list[tuple[dict[str, Any], bool]] = [
    *(({"error": {"message": message}}, True) for message in OVERFLOWS),
    ({"error": "unknown field `bogus`, expected one of max_new_tokens"}, False),
    (FLAT, False),
]


@pytest.mark.parametrize(("body", "overflow"), FOUR_HUNDREDS)
async def test_the_400_bodies_of_sglang(body: Any, overflow: bool) -> None:
    seen, handle = flaky(refusal(400, body))
    async with answering(handle) as calls:
        with pytest.raises(EngineError) as raised:
            await calls.generate(request())
    assert len(seen) == 1, "a 400 is not tried again"
    assert isinstance(raised.value, ContextOverflowError) is overflow
    inner = body.get("error", body)
    assert (inner if isinstance(inner, str) else inner["message"]) in str(raised.value)
    assert (raised.value.status, orjson.loads(raised.value.body)) == (400, body)
    assert calls.url in str(raised.value)


async def test_a_full_queue_is_waited_for(tokenizer: Any) -> None:
    """The 503 of the engine itself: nothing is lost, and the queued one is served in the end."""
    release = asyncio.Event()
    engine = EmbeddedEngine(
        tokenizer, lambda r: Reply("Hello.", hold=release), max_running=1, max_queued=0
    )

    async def sleep(seconds: float) -> None:
        release.set()
        await engine.until(lambda e: any(entry.status == 200 for entry in e.log))

    async with engine, client(engine.url, sleep=sleep) as calls:
        first = asyncio.create_task(calls.generate(request(session="first")))
        await engine.until(lambda e: e.held == 1)
        second = await calls.generate(request(session="second"))
        assert second.attempts == 2 and (await first).attempts == 1


async def test_a_list_of_one_answer_is_that_answer() -> None:
    async with answering(says([completion([3, 4])])) as calls:
        assert (await calls.generate(request())).output_ids.tolist() == [3, 4]
