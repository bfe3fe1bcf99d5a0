"""OpenAI's SDK over HTTP, and in process (`ToolrollClient`): judged by the engine's log."""

import asyncio
from functools import partial
from typing import Any

import pytest
from openai import (
    APITimeoutError,
    BadRequestError,
    NotFoundError,
)
from support.client_scenario import one_episode, play, saying
from support.endpoints import streamed
from support.in_process import in_process
from support.served import USER, user

from toolroll.testing import Reply

HI: dict[str, Any] = {"model": "m", "messages": [USER]}


@pytest.mark.parametrize("way", ["over HTTP", "in process", "a stream in process"])
async def test_an_episode(any_tokenizer: Any, way: str) -> None:
    options: dict[str, Any] = {"tokenizer": any_tokenizer, "split": "random"}
    async with in_process(saying, **options) as (bench, client):
        replies = list[Any]()
        ways: dict[str, Any] = {
            "over HTTP": bench.client().chat.completions.create,
            "in process": client.chat.completions.create,
            "a stream in process": partial(streamed, client),
        }

        async def recorded(**fields: Any) -> Any:
            replies.append(await ways[way](**fields))
            return replies[-1]

        last = await play(recorded)
        assert (last.content, last.reasoning_content) == ("All seen: <b>x</b>.", "What now?")
        await one_episode(bench)
        reasons = [reply.choices[0].finish_reason for reply in replies]
        assert reasons == ["tool_calls", "tool_calls", "stop"]
        [trajectory] = await client.trajectories()
        assert trajectory.trained_tokens == sum(turn.length for turn in trajectory.turns) > 0
        if "stream" not in way:
            entry, answer = bench.engine.log[-1], replies[-1]
            ids = (answer.prompt_token_ids, answer.choices[0].token_ids)
            assert ids == (entry.input_ids.tolist(), entry.output_ids)
            usage = answer.usage
            counts = (usage.prompt_tokens, usage.completion_tokens)
            assert counts == (len(entry.input_ids), len(entry.output_ids))
            assert usage.prompt_tokens_details.cached_tokens == entry.cached_tokens > 100


async def test_refusals_are_the_sdks_own_errors() -> None:
    async with in_process(context_length=64) as (_, client):
        create: Any = client.chat.completions.create
        with pytest.raises(BadRequestError) as refused:
            await create(**HI, extra_body={"best": 3})
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "best")
        with pytest.raises(BadRequestError) as full:
            await create(model="m", messages=[user("word " * 100)])
        assert full.value.code == "context_length_exceeded"
        with pytest.raises(NotFoundError, match="not served in process"):
            await client.embeddings.create(model="m", input="Hi")


async def test_the_sdks_time_out_hangs_up_and_its_retry_joins() -> None:
    release = asyncio.Event()
    async with in_process(Reply("Hello there.", hold=release, hold_after=1)) as (bench, client):
        hasty = client.with_options(timeout=0.05, max_retries=1)
        with pytest.raises(APITimeoutError):
            await hasty.chat.completions.create(**HI)
        assert len(bench.engine.log) == 1
        patient = client.with_options(timeout=0.3, max_retries=20)
        waiting = asyncio.create_task(patient.chat.completions.create(**HI))
        await bench.joined("s", retry=2)
        release.set()
        await waiting
        assert len(await bench.trajectories(refused=len(bench.engine.log) - 1)) == 1


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("way", ["canceled", "a canceled stream", "a stream that is left"])
async def test_a_client_that_gives_up_aborts_at_the_engine(way: str, over_http: bool) -> None:
    """Without a retry in the grace time."""
    hold = Reply("Hello there.", hold=asyncio.Event(), hold_after=3)
    settings = {"grace": 0.05 if over_http else 0.0}
    async with in_process(hold, settings=settings) as (bench, client):
        create: Any = (bench.client() if over_http else client).chat.completions.create

        async def ask() -> None:
            answer = await create(**HI, stream="stream" in way)
            if way.endswith("left"):
                async with answer as stream:
                    async for chunk in stream:
                        if chunk.choices[0].delta.content:
                            return
            async for _ in answer:
                pass

        waiting = asyncio.create_task(ask())
        if way.endswith("left"):
            await waiting
        else:
            await bench.engine.until(lambda engine: engine.held == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await bench.engine.until(lambda engine: engine.log[0].finished is not None)
        assert bench.engine.log[0].aborted
        assert await bench.trajectories() == []


async def test_models_copies_and_other_sessions() -> None:
    async with in_process() as (bench, client):
        name = bench.endpoint.model_name
        [card] = (await client.models.list()).data
        assert card.id == (await client.models.retrieve(name)).id == name
        assert str(client.base_url) == "http://toolroll.invalid/sessions/s/v1/"
        other = client.with_options(session="t", max_retries=7)
        assert (other.session, other.max_retries, client.copy().session) == ("t", 7, "s")
        for each in (client, other):
            await each.chat.completions.create(**HI)
        assert [entry.routing_key for entry in bench.engine.log] == ["s", "t"]
        assert client.reset("u") == "s"
        assert (client.session, other.session) == ("u", "t")
        await client.chat.completions.create(**HI)
        for session in ("s", "t", "u"):
            assert len(await bench.trajectories(session)) == 1


async def test_text_completions() -> None:
    async with in_process([" four. Five", " six."]) as (bench, client):
        create: Any = client.completions.create
        first = await create(model="m", prompt="One two three", logprobs=0, stop=["Five"])
        [choice] = first.choices
        assert (choice.text, choice.token_ids) == (" four. ", bench.engine.log[0].output_ids)
        await create(model="m", prompt=[*first.prompt_token_ids, *choice.token_ids])
        await bench.one_trajectory(turns=2)
