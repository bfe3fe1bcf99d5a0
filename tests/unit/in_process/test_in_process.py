"""`ToolrollClient`: the SDK's own client, answered in process; whole episodes, judged by the
engine's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from openai import APITimeoutError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError
from support.client_scenario import one_episode, play, saying
from support.endpoints import Bench, endpoint, streamed

from toolroll.endpoint.in_process import ToolrollClient
from toolroll.testing import Fault, Reply, load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}


@asynccontextmanager
async def in_process(policy: Any, **more: Any) -> AsyncIterator[tuple[Bench, ToolrollClient]]:
    """A client for the session "s", and the bench that judges it."""
    async with (
        endpoint(load_embedded_tokenizer(), policy, **more) as bench,
        ToolrollClient(bench.endpoint, session="s") as client,
    ):
        yield bench, client


async def test_an_episode() -> None:
    async with in_process(saying, split="random") as (bench, client):
        assert isinstance(client, AsyncOpenAI)
        await play(client.chat.completions.create)
        await one_episode(bench)
        [trajectory] = await client.trajectories()
        assert trajectory.trained_tokens == sum(turn.length for turn in trajectory.turns) > 0


async def test_an_episode_streamed() -> None:
    async with in_process(saying, split="random") as (bench, client):
        await play(partial(streamed, client))
        await one_episode(bench)


async def test_refusals_are_the_sdks_own_errors() -> None:
    async with in_process(lambda request: "Hello.", context_length=64) as (_, client):
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[USER], extra_body={"best": 3})
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "best")
        with pytest.raises(BadRequestError) as full:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "word " * 100}]
            )
        assert full.value.code == "context_length_exceeded"
        with pytest.raises(NotFoundError, match="not served in process"):
            await client.embeddings.create(model="m", input="Hi")


async def test_a_retry_after_an_engines_failure() -> None:
    plan = lambda request: Fault(status=503, body=b"{}") if request.index < 2 else None
    async with in_process(lambda request: "Hello.", faults=plan, config={"retries": 0}) as (
        bench,
        client,
    ):
        with pytest.raises(InternalServerError):
            await client.with_options(max_retries=0).chat.completions.create(
                model="m", messages=[USER]
            )
        await client.chat.completions.create(model="m", messages=[USER])
        assert len(await bench.trajectories()) == 1


async def test_the_sdks_time_out_hangs_up_and_its_retry_joins() -> None:
    release = asyncio.Event()
    hold = lambda request: Reply("Hello there.", hold=release, hold_after=1)
    async with in_process(hold) as (bench, client):
        with pytest.raises(APITimeoutError):
            await client.with_options(timeout=0.05, max_retries=1).chat.completions.create(
                model="m", messages=[USER]
            )
        assert len(bench.engine.log) == 1
        asking = asyncio.create_task(
            client.with_options(timeout=0.3, max_retries=20).chat.completions.create(
                model="m", messages=[USER]
            )
        )
        await bench.joined("s", retry=2)
        release.set()
        await asking
        assert len(await bench.trajectories(refused=len(bench.engine.log) - 1)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_a_call_aborts_it_at_the_engine(stream: bool) -> None:
    hold = lambda request: Reply("Hello there.", hold=asyncio.Event(), hold_after=1)
    async with in_process(hold, settings={"grace": 0.0}) as (bench, client):

        async def ask() -> None:
            made: Any = await client.chat.completions.create(
                model="m", messages=[USER], stream=stream
            )
            async for _ in made:
                pass

        asking = asyncio.create_task(ask())
        await bench.engine.until(lambda engine: engine.held == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await bench.engine.until(lambda engine: engine.log[0].finished is not None)
        assert bench.engine.log[0].aborted
        assert await bench.trajectories() == []


async def test_leaving_a_stream_early_hangs_up() -> None:
    said = "One two three four five six seven eight nine ten."
    async with in_process(lambda request: said, token_latency=0.05, settings={"grace": 0.0}) as (
        bench,
        client,
    ):
        async with await client.chat.completions.create(
            model="m", messages=[USER], stream=True
        ) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        await bench.engine.until(lambda engine: engine.log[0].finished is not None)
        assert bench.engine.log[0].aborted
        assert await bench.trajectories() == []


async def test_models_copies_and_other_sessions() -> None:
    async with in_process(lambda request: "Hello.") as (bench, client):
        [card] = (await client.models.list()).data
        assert (
            card.id
            == (await client.models.retrieve(bench.endpoint.model_name)).id
            == bench.endpoint.model_name
        )
        assert str(client.base_url) == "http://toolroll.invalid/sessions/s/v1/"
        other = client.with_options(session="t", max_retries=7)
        assert (other.session, other.max_retries, client.copy().session) == ("t", 7, "s")
        await client.chat.completions.create(model="m", messages=[USER])
        await other.chat.completions.create(model="m", messages=[USER])
        assert [entry.routing_key for entry in bench.engine.log] == ["s", "t"]
        assert client.reset("u") == "s"
        assert (client.session, other.session) == ("u", "t")
        await client.chat.completions.create(model="m", messages=[USER])
        for name in ("s", "t", "u"):
            assert len(await bench.trajectories(name)) == 1


async def test_text_completions() -> None:
    async with in_process(lambda request: " four. Five" if request.call == 0 else " six.") as (
        bench,
        client,
    ):
        first = await client.completions.create(
            model="m", prompt="One two three", logprobs=0, stop=["Five"]
        )
        assert first.choices[0].text == " four. "
        extra: Any = first.choices[0]
        assert extra.token_ids == bench.engine.log[0].output_ids
        ids: Any = first
        await client.completions.create(model="m", prompt=[*ids.prompt_token_ids, *extra.token_ids])
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2
