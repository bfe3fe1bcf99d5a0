"""The endpoint in front of the real SGLang server, called by the `openai` SDK; SGLang itself judges
the tokens."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from openai import AsyncOpenAI
from support.episodes import opened_model
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer
from support.wire import Wire, until

from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.endpoint.in_process import ToolrollClient

TOOLS: Any = [TOOL]
OPENED = '<tool_call>\n{"name": "look", "arguments": {'


def user(line: str) -> Any:
    return {"role": "user", "content": f"{line} <|im_end|>"}


@asynccontextmanager
async def serving(url: str, **settings: Any) -> AsyncIterator[tuple[EndpointServer, Any]]:
    """The endpoint on a free port, in front of the server or router at `url`."""
    own: Any = {"port": 0, "verify": "always", "sampling_params": {"max_new_tokens": 24}}
    async with opened_model(url, qwen3_tokenizer(), "qwen25") as served:
        core = Endpoint(served, EndpointSettings(**{**own, **settings}))
        async with EndpointServer(core) as server, aiohttp.ClientSession() as http:
            yield server, http


def client_of(server: EndpointServer, session: str, **options: Any) -> AsyncOpenAI:
    url = f"{server.url}/sessions/{session}/v1"
    return AsyncOpenAI(base_url=url, api_key="unused", **options)


async def create(client: AsyncOpenAI, line: str, **more: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=[user(line)], **more)


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


async def trajectories(server: EndpointServer, http: Any, session: str) -> list[dict[str, Any]]:
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


async def test_a_conversation_over_http_and_in_process(float32: Wire, sglang_float32: Any) -> None:
    async with serving(sglang_float32.url) as (server, http):
        async with client_of(server, "over-http") as client:
            replies = await talk(client, "over-http")
        assert replies[1].usage.prompt_tokens_details.cached_tokens > 20
        await rescored(float32, await trajectories(server, http, "over-http"), replies)
        async with ToolrollClient(server.endpoint, session="in-process") as inside:
            replies = await talk(inside, "in-process")
        await rescored(float32, await trajectories(server, http, "in-process"), replies)


async def test_a_forced_call_and_a_schema_are_constrained_and_marked(sglang_float32: Any) -> None:
    properties = {"way": {"enum": ["north", "south"]}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    schema["required"] = ["way"]
    async with serving(sglang_float32.url) as (server, http), client_of(server, "forced") as client:
        forced = await create(
            client, "Look.", tools=TOOLS, tool_choice="required", n=4, max_tokens=48
        )
        decode = server.endpoint.model.template.encoder.decode
        for choice in forced.choices:
            text = decode(choice.token_ids)
            assert text.startswith(OPENED) or OPENED.startswith(text)
            if choice.finish_reason != "length":
                assert choice.finish_reason == "tool_calls"
                assert choice.message.tool_calls[0].function.name == "look"
        form: Any = {"type": "json_schema", "json_schema": {"name": "way", "schema": schema}}
        said = await create(client, "Where?", response_format=form, max_tokens=60)
        if said.choices[0].finish_reason == "stop":  # the grammar allows any number of spaces
            assert json.loads(said.choices[0].message.content or "")["way"] in ("north", "south")
        found = await trajectories(server, http, "forced")
        marks = {turn["constrained"] for trajectory in found for turn in trajectory["turns"]}
        assert marks == {"ebnf", "json_schema"}


async def test_a_hang_up_reaches_the_server(sglang_float32: Any, http: Any) -> None:
    async with (
        serving(sglang_float32.url, grace=0.0) as (server, _),
        client_of(server, "gone", max_retries=0) as client,
    ):
        body: Any = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
        stream = await create(client, "Go.", stream=True, **body)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        session, wire = server.endpoint.sessions.find("gone"), Wire(http, sglang_float32.url)

        async def idle() -> bool:
            return session.pending.in_flight == 0 and await wire.idle()

        await until(idle, "the request is gone")
        assert session.session.trajectories() == ()
