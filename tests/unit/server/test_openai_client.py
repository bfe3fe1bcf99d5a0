"""Whole episodes through the endpoint by the OpenAI SDK; the trajectories are judged by the
engine's own log.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from openai import OpenAI
from support.client_scenario import FIRST, one_episode, play, saying, seen
from support.endpoints import streamed
from support.listed_environment import TOOL
from support.served import serve

from toolroll.testing import Fault, Reply

DOWN = Fault(status=503, body=b'{"error":"overloaded"}')
STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.mark.parametrize("way", ["async", "sync", "stream"])
async def test_an_episode(any_tokenizer: Any, way: str) -> None:
    """The SDK puts the deltas of a stream together itself."""
    async with serve(saying, tokenizer=any_tokenizer, split="random") as bench:
        client = bench.client()
        with OpenAI(base_url=f"{bench.url}/sessions/s/v1", api_key="unused") as synchronous:
            create: Any = synchronous.chat.completions.create
            ways: dict[str, Any] = {
                "async": client.chat.completions.create,
                "sync": partial(asyncio.to_thread, create),
                "stream": partial(streamed, client, stream_options={"include_usage": True}),
            }
            replies: list[Any] = []

            async def recorded(**fields: Any) -> Any:
                replies.append(await ways[way](**fields))
                return replies[-1]

            last = await play(recorded)
        assert (last.content, last.reasoning_content) == ("All seen: <b>x</b>.", "What now?")
        await one_episode(bench)
        reasons = [reply.choices[0].finish_reason for reply in replies]
        assert reasons == ["tool_calls", "tool_calls", "stop"]
        if way != "stream":
            entry, answer = bench.engine.log[-1], replies[-1]
            ids = (answer.prompt_token_ids, answer.choices[0].token_ids)
            assert ids == (entry.input_ids.tolist(), entry.output_ids)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached == entry.cached_tokens > 100


@STREAM
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


@STREAM
async def test_a_hang_up_without_a_retry_is_aborted_at_the_engine(stream: bool) -> None:
    hold = lambda request: Reply(saying(request), hold=asyncio.Event(), hold_after=2)
    async with serve(hold, settings={"grace": 0.05}) as bench:
        create: Any = bench.client().chat.completions.create

        async def ask() -> None:
            async for _ in await create(model="m", messages=FIRST, stream=stream):
                pass

        waiting = asyncio.create_task(ask())
        await bench.engine.until(lambda engine: engine.held == 1)
        waiting.cancel()
        await bench.engine.until(lambda engine: engine.log[0].finished is not None)
        assert bench.engine.log[0].aborted
        assert await bench.trajectories() == []


@STREAM
@pytest.mark.parametrize("stored", [False, True])
async def test_openai_responses(any_tokenizer: Any, stream: bool, stored: bool) -> None:
    """`responses.create`: with the whole history, and with the id of the previous response."""
    async with serve(saying, tokenizer=any_tokenizer, split="random") as bench:
        responses: Any = bench.client().responses
        tools = [{"type": "function", **TOOL["function"]}]
        body: dict[str, Any] = {"model": "m", "instructions": FIRST[0]["content"], "tools": tools}
        items = [{"role": "user", "content": FIRST[1]["content"]}]
        while True:
            if stream:
                created = await responses.create(**body, input=items, stream=True)
                response = [event async for event in created][-1].response
            else:
                response = await responses.create(**body, input=items)
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
                body["previous_response_id"] = response.id
            items = results if stored else [*items, *response.output, *results]
        assert response.output_text == "All seen: <b>x</b>."
        assert await responses.retrieve(response.id) == response
        await one_episode(bench)
