"""Whole episodes through the endpoint by the OpenAI SDK; the trajectories are judged by the
engine's own log.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest
from openai import InternalServerError, OpenAI
from support.client_scenario import FIRST, one_episode, play, saying, seen
from support.endpoints import streamed
from support.listed_environment import TOOL
from support.served import serve

from toolroll.testing import Fault, Reply

DOWN = Fault(status=503, body=b'{"error":"overloaded"}')


async def test_openai_async(any_tokenizer: Any) -> None:
    async with serve(saying, tokenizer=any_tokenizer, split="random") as bench:
        last = await play(bench.client().chat.completions.create)
        assert (last.content, last.reasoning_content) == ("All seen: <b>x</b>.", "What now?")
        await one_episode(bench)


async def test_openai_sync() -> None:
    async with serve(saying, split="random") as bench:
        with OpenAI(base_url=f"{bench.url}/sessions/s/v1", api_key="unused") as client:
            create: Any = client.chat.completions.create
            await play(lambda **fields: asyncio.to_thread(create, **fields))
        await one_episode(bench)


async def test_openai_streaming(any_tokenizer: Any) -> None:
    """`chat.completions.stream`, which puts the deltas together itself."""
    async with serve(saying, tokenizer=any_tokenizer, split="random") as bench:
        client = bench.client()
        last = await play(partial(streamed, client), stream_options={"include_usage": True})
        assert last.content == "All seen: <b>x</b>."
        await one_episode(bench)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_retries_what_the_engine_refused(stream: bool) -> None:
    """The engine fails as often as its client tries; the SDK's own retry then succeeds, and all
    is there once.
    """
    faults = lambda request: DOWN if request.index in (1, 2, 4, 5) else None
    async with serve(saying, faults=faults, config={"retries": 1}) as bench:
        client = bench.client(max_retries=2)
        await play(partial(streamed, client) if stream else client.chat.completions.create)
        await one_episode(bench)
        assert len(bench.engine.log) == 3 + 4


async def test_openai_without_retries_gets_the_error() -> None:
    async with serve(saying, faults=lambda request: DOWN, config={"retries": 0}) as bench:
        with pytest.raises(InternalServerError) as caught:
            await bench.client(max_retries=0).chat.completions.create(model="m", messages=FIRST)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_overloaded")
        assert await bench.trajectories() == []


async def test_openai_times_out_retries_and_joins_its_own_request() -> None:
    """The SDK hangs up at its time-out and asks again: the same request goes on, and is sampled
    once.
    """
    release = asyncio.Event()
    hold = lambda request: (
        Reply(saying(request), hold=release, hold_after=2) if request.call == 1 else saying(request)
    )
    async with serve(hold) as bench:
        client = bench.client(max_retries=20, timeout=1.0)
        playing = asyncio.create_task(play(client.chat.completions.create))
        await bench.engine.until(lambda engine: engine.held == 1)
        await bench.joined("s", retry=1)
        release.set()
        await playing
        await one_episode(bench)
        assert len(bench.engine.log) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_without_a_retry_is_aborted_at_the_engine(stream: bool) -> None:
    hold = lambda request: Reply(saying(request), hold=asyncio.Event(), hold_after=2)
    async with serve(hold, settings={"grace": 0.05}) as bench:
        create: Any = bench.client().chat.completions.create

        async def ask() -> None:
            answer = await create(model="m", messages=FIRST, stream=stream)
            async for _ in answer:
                pass

        asking = asyncio.create_task(ask())
        await bench.engine.until(lambda engine: engine.held == 1)
        asking.cancel()
        await bench.engine.until(lambda engine: engine.log[0].finished is not None)
        assert bench.engine.log[0].aborted
        assert await bench.trajectories() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_openai_responses(any_tokenizer: Any, stream: bool, stored: bool) -> None:
    """`responses.create`: with the whole history, and with the id of the previous response."""
    async with serve(saying, tokenizer=any_tokenizer, split="random") as bench:
        responses = bench.client().responses
        body: dict[str, Any] = {
            "model": "m",
            "instructions": FIRST[0]["content"],
            "input": [{"role": "user", "content": FIRST[1]["content"]}],
            "tools": [{"type": "function", **TOOL["function"]}],
        }
        while True:
            if stream:
                events = [event async for event in await responses.create(**body, stream=True)]
                response = cast("Any", events[-1]).response
            else:
                response = await responses.create(**body)
            results = [
                {
                    "type": "function_call_output",
                    "call_id": item.call_id,
                    "output": seen(item.arguments),
                }
                for item in response.output
                if item.type == "function_call"
            ]
            if not results:
                break
            if stored:
                body |= {"previous_response_id": response.id, "input": results}
            else:
                body["input"] = [*body["input"], *response.output, *results]
        assert response.output_text == "All seen: <b>x</b>."
        assert await responses.retrieve(response.id) == response
        await one_episode(bench)
