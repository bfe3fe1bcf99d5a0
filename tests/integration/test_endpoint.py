"""The endpoint in front of the real SGLang server and the real router, asked by the `openai`
SDK; SGLang itself judges the tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError
from support.episodes import opened_model
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer
from support.wire import Wire, until

from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.endpoint.in_process import ToolrollClient

SESSIONS = 8
TOOLS: Any = [TOOL]
OPENED = '<tool_call>\n{"name": "look", "arguments": {'


def user(line: str) -> Any:
    return {"role": "user", "content": f"{line} <|im_end|>"}


@asynccontextmanager
async def serving(
    url: str, **settings: Any
) -> AsyncIterator[tuple[EndpointServer, aiohttp.ClientSession]]:
    """The endpoint on a free port, in front of the server or router at `url`."""
    own: Any = {"port": 0, "verify": "always", "sampling_params": {"max_new_tokens": 24}}
    async with opened_model(url, qwen3_tokenizer(), "qwen25") as served:
        core = Endpoint(served, EndpointSettings(**{**own, **settings}))
        async with EndpointServer(core) as server, aiohttp.ClientSession() as http:
            yield server, http


def client_of(server: EndpointServer, session: str, **options: Any) -> AsyncOpenAI:
    url = f"{server.url}/sessions/{session}/v1"
    return AsyncOpenAI(base_url=url, api_key="unused", **options)


async def talk(client: AsyncOpenAI, name: str, turns: int = 4) -> list[Any]:
    """A conversation of several turns; the random model's turns are cut by length, and go on."""
    messages: list[Any] = [{"role": "system", "content": f"You are agent {name}."}]
    replies = []
    for at in range(turns):
        messages.append(user(f"This is line {at} of {name}."))
        reply = await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, temperature=1.0
        )
        replies.append(reply)
        messages.append(reply.choices[0].message)
        called = [wanted.id for wanted in reply.choices[0].message.tool_calls or ()]
        messages += [{"role": "tool", "tool_call_id": each, "content": "seen"} for each in called]
    return replies


async def trajectories(
    server: EndpointServer, http: aiohttp.ClientSession, session: str
) -> list[dict[str, Any]]:
    async with http.get(f"{server.url}/sessions/{session}/trajectories") as response:
        found = await response.json()
    assert found["mismatches"].keys() <= {"unshown"}
    return list(found["trajectories"])


async def rescored(wire: Wire, found: list[dict[str, Any]], replies: list[Any]) -> None:
    """Each reply is trained once, with the logprobs that SGLang's prefill gives its tokens."""
    trained = []
    for trajectory in found:
        ids, mask = trajectory["input_ids"], np.array(trajectory["loss_mask"], dtype=bool)
        again = np.array([np.nan, *await wire.rescore(ids)])
        given = np.array([np.nan if value is None else value for value in trajectory["logprobs"]])
        assert np.abs(given[mask] - again[mask]).max() <= 1e-4
        trained += [ids[: turn["stop"]] for turn in trajectory["turns"] if turn["excluded"] is None]
    assert sorted(trained) == sorted(
        [*reply.prompt_token_ids, *reply.choices[0].token_ids] for reply in replies
    )


async def test_a_conversation_over_http_and_one_in_process(
    float32: Wire, sglang_float32: Any
) -> None:
    async with serving(sglang_float32.url) as (server, http):
        async with client_of(server, "over-http") as client:
            replies = await talk(client, "over-http")
        assert replies[1].usage.prompt_tokens_details.cached_tokens > 20
        await rescored(float32, await trajectories(server, http, "over-http"), replies)
        async with ToolrollClient(server.endpoint, session="in-process") as inside:
            replies = await talk(inside, "in-process")
        await rescored(float32, await trajectories(server, http, "in-process"), replies)


async def test_streams_and_logprobs(sglang_float32: Any) -> None:
    async with serving(sglang_float32.url) as (server, _), client_of(server, "stream") as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[user("Go.")],
            stream=True,
            logprobs=True,
            top_logprobs=3,
            temperature=1.0,
            max_tokens=200,
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        choices: list[Any] = [choice for chunk in chunks for choice in chunk.choices]
        last = next(choice for choice in choices if choice.finish_reason)
        content = last.logprobs.content
        assert [entry.token_id for entry in content] == last.token_ids
        assert all(len(entry.top_logprobs) == 3 for entry in content)
        texts = [choice.delta.content for choice in choices if choice.delta.content]
        assert len(texts) > 1  # a loaded server sends several at once
        [turn] = server.endpoint.sessions.find("stream").session.trajectories()[0].turns
        assert turn.length == len(content)


async def test_a_forced_call_and_a_schema_are_constrained_and_marked(sglang_float32: Any) -> None:
    properties = {"way": {"enum": ["north", "south"]}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    schema["required"] = ["way"]
    async with serving(sglang_float32.url) as (server, http), client_of(server, "forced") as client:
        forced: Any = await client.chat.completions.create(
            model="m",
            messages=[user("Look.")],
            tools=TOOLS,
            tool_choice="required",
            n=4,
            max_tokens=48,
        )
        decode = server.endpoint.model.template.encoder.decode
        for choice in forced.choices:
            text = decode(choice.token_ids)
            assert text.startswith(OPENED) or OPENED.startswith(text)
            if choice.finish_reason != "length":
                assert choice.finish_reason == "tool_calls"
                assert choice.message.tool_calls[0].function.name == "look"
        form: Any = {"type": "json_schema", "json_schema": {"name": "way", "schema": schema}}
        said = await client.chat.completions.create(
            model="m", messages=[user("Where?")], response_format=form, max_tokens=60
        )
        if said.choices[0].finish_reason == "stop":  # the grammar allows any number of spaces
            assert json.loads(said.choices[0].message.content or "")["way"] in ("north", "south")
        found = await trajectories(server, http, "forced")
        marks = {turn["constrained"] for trajectory in found for turn in trajectory["turns"]}
        assert marks == {"ebnf", "json_schema"}


async def test_a_hang_up_reaches_the_server(
    sglang_float32: Any, http: aiohttp.ClientSession
) -> None:
    async with (
        serving(sglang_float32.url, grace=0.0) as (server, _),
        client_of(server, "gone", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="m",
            messages=[user("Go.")],
            max_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        session, wire = server.endpoint.sessions.find("gone"), Wire(http, sglang_float32.url)

        async def idle() -> bool:
            return session.pending.in_flight == 0 and await wire.running() == 0

        await until(idle, "the request is gone")
        assert session.session.trajectories() == ()


async def test_sessions_stay_at_their_workers(
    routed_sglang: Any, http: aiohttp.ClientSession
) -> None:
    routed_sglang.clear()
    names = [f"through-{at}" for at in range(SESSIONS)]
    async with serving(routed_sglang.url) as (server, mine):
        clients = [client_of(server, name) for name in names]
        every = await asyncio.gather(
            *(talk(client, name, 3) for client, name in zip(clients, names, strict=True))
        )
        wire = Wire(http, routed_sglang.workers[0].url)  # both hold the same weights
        for name, replies in list(zip(names, every, strict=True))[:3]:
            await rescored(wire, await trajectories(server, mine, name), replies)
        with pytest.raises(BadRequestError) as caught:
            await clients[0].chat.completions.create(
                model="m", messages=[user("Go.")], logit_bias={"5": 1}
            )
        assert caught.value.param == "logit_bias"  # the router would drop it without a word
        for client in clients:
            await client.close()
    routed_sglang.sessions(names)
