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
from support.wire import Wire

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
        async with AsyncOpenAI(
            base_url=f"{server.url}/sessions/over-http/v1", api_key="unused"
        ) as client:
            replies = await talk(client, "over-http")
        assert replies[1].usage.prompt_tokens_details.cached_tokens > 20
        await rescored(float32, await trajectories(server, http, "over-http"), replies)
        async with ToolrollClient(server.endpoint, session="in-process") as inside:
            replies = await talk(inside, "in-process")
        await rescored(float32, await trajectories(server, http, "in-process"), replies)


async def test_streams_and_logprobs(sglang_float32: Any) -> None:
    async with (
        serving(sglang_float32.url) as (server, _),
        AsyncOpenAI(base_url=f"{server.url}/sessions/stream/v1", api_key="unused") as client,
    ):
        asked: Any = {
            "model": "m",
            "messages": [user("Go.")],
            "logprobs": True,
            "top_logprobs": 3,
            "temperature": 1.0,
        }
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                **asked, stream=True, max_tokens=200, extra_body={"ignore_eos": True}
            )
        ]
        texts = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        assert len([text for text in texts if text]) > 1  # a loaded server sends several at once
        last: Any = next(
            chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason
        )
        content = last.choices[0].logprobs.content
        assert [entry.token_id for entry in content] == last.choices[0].token_ids
        assert all(len(entry.top_logprobs) == 3 for entry in content)
        [turn] = server.endpoint.sessions.find("stream").session.trajectories()[0].turns
        assert turn.length == len(content)


async def test_a_forced_call_and_a_schema_are_constrained_and_marked(sglang_float32: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"way": {"enum": ["north", "south"]}},
        "required": ["way"],
        "additionalProperties": False,
    }
    async with (
        serving(sglang_float32.url) as (server, http),
        AsyncOpenAI(base_url=f"{server.url}/sessions/forced/v1", api_key="unused") as client,
    ):
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
        marks = {
            turn["constrained"]
            for found in await trajectories(server, http, "forced")
            for turn in found["turns"]
        }
        assert marks == {"ebnf", "json_schema"}


async def test_a_hang_up_reaches_the_server(
    sglang_float32: Any, http: aiohttp.ClientSession
) -> None:
    async with (
        serving(sglang_float32.url, grace=0.0) as (server, _),
        AsyncOpenAI(
            base_url=f"{server.url}/sessions/gone/v1", api_key="unused", max_retries=0
        ) as client,
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
        for _ in range(200):
            async with http.get(f"{sglang_float32.url}/server_info") as response:
                info = await response.json()
            states = info.get("internal_states") or [{}]
            if server.endpoint.sessions.find("gone").pending.in_flight == 0 and not states[0].get(
                "num_running_reqs"
            ):
                break
            await asyncio.sleep(0.05)
        assert server.endpoint.sessions.find("gone").pending.in_flight == 0
        assert server.endpoint.sessions.find("gone").session.trajectories() == ()


async def test_sessions_stay_at_their_workers(
    routed_sglang: Any, http: aiohttp.ClientSession
) -> None:
    for proxy in routed_sglang.proxies:
        proxy.clear()
    names = [f"through-{at}" for at in range(SESSIONS)]
    async with serving(routed_sglang.url) as (server, mine):
        clients = [
            AsyncOpenAI(base_url=f"{server.url}/sessions/{name}/v1", api_key="unused")
            for name in names
        ]
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
    by_worker = [
        {seen.routing_key for seen in proxy.generations()} & set(names)
        for proxy in routed_sglang.proxies
    ]
    assert by_worker[0].isdisjoint(by_worker[1])
    assert by_worker[0] | by_worker[1] == set(names)
