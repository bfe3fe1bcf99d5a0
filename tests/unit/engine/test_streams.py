"""`read_stream`: what is read of each event of a stream, and what is no event."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from support.client import answering, request
from support.episodes import serving
from support.http import completion

from toolroll.rollout.engine import Engine
from toolroll.rollout.errors import CompletionError, EngineError


@asynccontextmanager
async def streaming(*events: bytes, read: asyncio.Event | None = None) -> AsyncIterator[Engine]:
    """A client of a server that sends `events`; with `read`, each one after it was set."""

    async def handle(http: web.Request) -> web.StreamResponse:
        await http.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for number, event in enumerate(events):
            if number and read:
                await read.wait()
                read.clear()
            await response.write(b"data: " + event + b"\n\n")
        await response.write_eof()
        return response

    async with answering(handle) as calls:
        yield calls


async def streamed(*events: bytes) -> tuple[list[list[int]], Any]:
    """What `progress` received, before the next event was sent, and the completion."""
    received: list[list[int]] = []
    read = asyncio.Event()

    def progress(ids: Sequence[int]) -> None:
        received.append(list(ids))
        read.set()

    async with streaming(*events, read=read) as calls:
        return received, await calls.generate(request(), progress=progress)


LAST = orjson.dumps(completion([3, 4]))


async def test_of_all_events_but_the_last_only_the_ids_are_read() -> None:
    """With all their logprobs, a stream of n tokens would cost n squared to read."""
    begun = (
        b'{"text": "\\"output_ids\\": [9]", "output_ids": [3], "meta_info": {"finish_reason": '
        b'null, "output_token_logprobs": [[no JSON'
    )
    told, answer = await streamed(begun, LAST)
    assert told == [[3], [3, 4]]
    assert answer.output_ids.tolist() == [3, 4] and answer.logprobs.tolist() == [-0.5, -1.5]


def event(ids: list[int], count: int, start: int = 0, **meta: Any) -> bytes:
    """An event with `ids`, of which the first one is number `start` of `count` ids."""
    given: dict[str, Any] = {
        "finish_reason": None,
        "completion_tokens": count,
        "output_token_logprobs": [[-1.0 - start - at, index, None] for at, index in enumerate(ids)],
        "output_top_logprobs": [[[-0.5 - start - at, 7, None]] for at in range(len(ids))],
        "weight_versions": [{"version": "a", "start": 0, "end": count}],
    }
    text = "".join(map(chr, ids))
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": {**given, **meta}})


STOP: dict[str, Any] = {"finish_reason": {"type": "stop", "matched": 15}}
ABORT: dict[str, Any] = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
SPLITS = [[1, 2, 3, 5], [1, 5], [3, 4, 5], [5], [5, 5]]
"""After each event, the number of ids that were sent."""


@pytest.mark.parametrize("counts", SPLITS)
@pytest.mark.parametrize("ids", [[11, 12, 13, 14, 15], [15] * 5])
async def test_incremental_events_give_the_same_answer(ids: list[int], counts: list[int]) -> None:
    """Repeated ids must not make one form look like the other."""
    ends: list[dict[str, Any]] = [{}] * (len(counts) - 1) + [STOP]
    starts = [0, *counts[:-1]]
    cumulative = [event(ids[:n], n, **end) for n, end in zip(counts, ends, strict=True)]
    incremental = [
        event(ids[start:n], n, start, **end)
        for start, n, end in zip(starts, counts, ends, strict=True)
    ]
    told, expected = await streamed(*cumulative)
    got_told, got = await streamed(*incremental)
    assert got_told == told == [ids[:n] for n in counts]
    assert got.output_ids.tolist() == expected.output_ids.tolist() == ids
    assert got.logprobs.tolist() == expected.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert got.top_logprobs == expected.top_logprobs and len(got.top_logprobs) == 5
    assert got.weight_versions == expected.weight_versions
    assert got.text == expected.text == "".join(map(chr, ids))


async def test_an_abort_in_the_queue_repeats_the_last_incremental_id() -> None:
    """SGLang 0.5.23, `_handle_abort_req`: the logprobs and the text are whole there."""
    whole = [[-1.0, 11, None], [-2.0, 12, None]]
    aborted = event([12], 2, output_token_logprobs=whole, output_top_logprobs=None, **ABORT)
    told, answer = await streamed(event([11, 12], 2), aborted)
    assert told == [[11, 12]]
    assert answer.finish_reason == "abort" and answer.output_ids.tolist() == [11, 12]
    assert answer.logprobs.tolist() == [-1.0, -2.0] and len(answer.top_logprobs) == 2


async def test_the_last_cumulative_event_may_be_empty() -> None:
    whole = event([11, 15], 2)
    told, answer = await streamed(event([11], 1), whole, event([], 2, text="", **STOP))
    assert told == [[11], [11, 15]]
    assert answer.finish_reason == "stop" and answer.output_ids.tolist() == [11, 15]
    assert answer.logprobs.tolist() == [-1.0, -2.0] and answer.text == "".join(map(chr, [11, 15]))
    in_one_chunk = whole + b"\n\ndata: " + event([], 2, text="", **STOP)
    told, again = await streamed(event([11], 1), event([11, 15], 2), in_one_chunk)
    assert again.output_ids.tolist() == [11, 15] and len(again.logprobs) == 2


NEITHER, BOTH = "neither cumulative nor incremental", "both cumulative and incremental"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event([11], 1), event([11, 12], 2), event([], 3, **ABORT)], NEITHER),
        ([event([11], 1), event([12], 3)], NEITHER),
        ([event([11], 1), event([12], 2, completion_tokens="2", **ABORT)], NEITHER),
        ([event([11, 12], 2), event([11], 2)], NEITHER),
        ([event([11], 1), event([11, 12], 1, **ABORT)], "counts 1 sampled tokens and sent 2"),
        ([event([11], 1), event([12, 13], 2)], "changed ids"),
        ([event([11], 1), event([12], 2), event([11, 12, 13], 3)], BOTH),
        ([event([11], 1), event([11, 12], 2), event([13], 3)], BOTH),
    ],
)
async def test_a_stream_that_has_neither_form_is_refused(events: list[bytes], message: str) -> None:
    with pytest.raises(CompletionError, match=message):
        await streamed(*events)


async def test_what_progress_raises_is_the_callers() -> None:
    """And no failure of the engine's, although a `BrokenPipeError` looks like one. A stream without
    its last event is a broken connection.
    """

    def progress(ids: Sequence[int]) -> None:
        raise BrokenPipeError("the caller's pipe")

    async with streaming(LAST) as calls:
        with pytest.raises(BrokenPipeError, match="the caller's pipe"):
            await calls.generate(request(), progress=progress)
    with pytest.raises(EngineError, match="broke off"):
        await streamed(orjson.dumps(completion([3], finish_reason=None)))


GARBLED = [b'{"output_ids": [1], "meta_info"', b'{"output_ids": 5, "meta_info": {}}', b"\xff", b"7"]


@pytest.mark.parametrize("event", [*GARBLED, b'{"meta_info": [1]}', b"[]"])
async def test_a_garbled_event_is_a_contradictory_answer(event: bytes) -> None:
    with pytest.raises(CompletionError, match="an event of the engine's stream is no"):
        await streamed(event)


async def test_the_embedded_engine_streams_in_both_forms(tokenizer: Any) -> None:
    answers = []
    for incremental in (False, True):
        received: list[Sequence[int]] = []
        async with serving(
            tokenizer,
            lambda request: "One 🙂 two, one 🙂 two.",
            split="random",
            incremental_streaming_output=incremental,
        ) as (engine, served):
            prompt = served.template.encoder.encode("Count.")
            params = {"max_new_tokens": 64, "stream_interval": 2}
            extra = {"top_logprobs_num": 2}
            answer = await served.generate(
                request(prompt, sampling_params=params, extra=extra), progress=received.append
            )
            [entry] = engine.log
        assert received[-1] == answer.output_ids.tolist() == entry.output_ids and len(received) > 1
        same = asdict(answer) | dict.fromkeys(("latency", "rid"))
        answers.append({name: np.asarray(value).tolist() for name, value in same.items()})
    assert answers[0] == answers[1] and answers[0]["logprobs"]
