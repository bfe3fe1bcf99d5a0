"""Whole episodes through the endpoint by the OpenAI SDK; the trajectories are judged by the
engine's own log. Its retries are in `tests/unit/in_process/test_in_process.py`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from openai import OpenAI
from support.client_scenario import FIRST, one_episode, play, saying
from support.endpoints import streamed
from support.served import serve

from toolroll.testing import Reply


@pytest.mark.parametrize("way", ["async", "sync", "stream"])
async def test_an_episode(any_tokenizer: Any, way: str) -> None:
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


@pytest.mark.parametrize("stream", [False, True])
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
