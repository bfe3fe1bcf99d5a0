"""`read_stream`: what is read of each event of a stream, and what is no event."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.client import client, request
from support.http import completion, http_server

from toolroll.rollout.errors import CompletionError, EngineError


async def streamed(*events: bytes) -> tuple[list[list[int]], Any]:
    """What progress was told, and the completion; each event is sent when progress was told of
    the one before it.
    """
    told: list[list[int]] = []
    read = asyncio.Event()

    async def handle(http: web.Request) -> web.StreamResponse:
        await http.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for at, event in enumerate(events):
            if at:
                await read.wait()
            read.clear()
            await response.write(b"data: " + event + b"\n\n")
        await response.write_eof()
        return response

    def progress(ids: Sequence[int]) -> None:
        told.append(list(ids))
        read.set()

    async with http_server({"/generate": handle}) as url, client(url) as calls:
        answer = await calls.generate(request(), progress=progress)
    return told, answer


def says_streamed(event: bytes) -> Any:
    async def handle(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b"data: " + event + b"\n\n")
        return response

    return handle


LAST = orjson.dumps(completion([3, 4]))


async def test_of_all_events_but_the_last_only_the_ids_are_read() -> None:
    """They are cumulative: with all their logprobs a stream of n tokens would cost n squared to
    read.
    """
    begun = (
        b'{"text": "\\"output_ids\\": [9]", "output_ids": [3], "meta_info": {"finish_reason": '
        b'null, "output_token_logprobs": [[no JSON'
    )
    told, answer = await streamed(begun, LAST)
    assert told == [[3], [3, 4]]
    assert answer.output_ids.tolist() == [3, 4] and answer.logprobs.tolist() == [-0.5, -1.5]


async def test_a_stream_without_its_last_event_is_a_broken_connection() -> None:
    with pytest.raises(EngineError, match="broke off"):
        await streamed(orjson.dumps(completion([3], finish_reason=None)))


@pytest.mark.parametrize(
    "event",
    [
        b'{"output_ids": [1], "meta_info"',
        b"\xff",
        b"[]",
        b"7",
        b'{"meta_info": [1]}',
        b'{"output_ids": 5, "meta_info": {}}',
    ],
)
async def test_a_garbled_event_is_a_contradictory_answer(event: bytes) -> None:
    with pytest.raises(CompletionError, match="an event of the engine's stream is no"):
        await streamed(event)


async def test_what_progress_raises_is_the_callers() -> None:
    """And no failure of the engine's, although a `BrokenPipeError` looks like one."""

    def progress(ids: Sequence[int]) -> None:
        raise BrokenPipeError("the caller's pipe")

    async with http_server({"/generate": says_streamed(LAST)}) as url, client(url) as calls:
        with pytest.raises(BrokenPipeError, match="the caller's pipe"):
            await calls.generate(request(), progress=progress)
