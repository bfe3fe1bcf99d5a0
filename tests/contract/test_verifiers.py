"""verifiers' own client class, dialect and trace, with `toolroll serve` behind them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from support.bare import run_apart

_NEEDED = ("verifiers", "anthropic", "docstring_parser", "tomli_w", "renderers", "pydantic_config")

_BEGIN = """
import asyncio

absent("prime_sandboxes")  # a client of a paid service
bare("verifiers", "verifiers.v1")
"""

_CLIENT = """
from support.endpoints import endpoint
import numpy as np
from support.experts import first_experts
from support.listed_environment import TOOL
from toolroll.trainers.verifiers import EndpointClient
from toolroll.testing import Fault, load_embedded_tokenizer
from verifiers.v1 import graph
from verifiers.v1.clients import Client, TrainClientConfig
from verifiers.v1.dialects.anthropic import AnthropicDialect
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig

USER = {"role": "user", "content": "Hi"}


async def refused(call, words):
    try:
        await call
    except ProviderError as error:
        assert words in str(error), error
    else:
        raise AssertionError("not refused")


async def main():
    said = ["I look.", "Found it.", "Bye."]
    async with endpoint(
        load_embedded_tokenizer(), lambda it: said[it.index % 3],
        faults=lambda _: Fault(evict=True), config={"return_routed_experts": True},
    ) as bench:
        client = EndpointClient(TrainClientConfig(base_url=bench.url + "/v1"), expert_layers=2)
        assert isinstance(client, Client)
        dialect, sampling, messages = ChatDialect(), SamplingConfig(), [USER]
        trace = Trace.model_construct(id="trace", nodes=[], calls=[], tools=[])
        for _ in said:
            body = {
                "model": "default", "messages": messages, "tools": [TOOL], "stream": True,
                "max_tokens": 64,
            }
            request = dialect.parse_request(body)
            turn = graph.prepare_turn(trace, request.messages, request.tools)
            response = await client.get_response(dialect, body, sampling, trace.id, turn)
            assert len(response.tokens.completion_ids) == len(response.tokens.completion_logprobs)
            turn.commit(response)
            reply = response.raw["choices"][0]["message"]
            messages = [*messages, {"role": "assistant", "content": reply["content"]}, USER]
        (branch,) = trace.branches
        (ours,) = bench.endpoint.sessions.get("trace").session.trajectories()
        assert branch.token_ids == ours.input_ids.tolist()
        masks = [value for node in branch.nodes for value in node.mask]
        assert masks == ours.loss_mask.astype(bool).tolist() and sum(masks)
        logprobs = [value for node in branch.nodes for value in node.logprobs]
        assert logprobs == [float(value) for value in ours.logprobs[ours.loss_mask == 1]]
        experts = branch.routed_experts  # with a placeholder for the last token
        assert experts.shape == (len(ours), 2, 2) and experts.dtype == np.uint8
        expected = first_experts(bench.engine.log, ours.input_ids)
        assert np.array_equal(experts[:-1].reshape(-1, 4), expected)
        assert np.array_equal(ours.routed_experts, expected)

        await refused(
            client.get_response(AnthropicDialect(), {}, sampling), "only chat completions"
        )
        await client.close()


asyncio.run(main())
"""


_SERVER = """
from openai import AsyncOpenAI
from support.endpoints import endpoint
from toolroll.trainers.verifiers import EndpointClient, register
from toolroll.testing import load_embedded_tokenizer
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import Trace


async def said_by(agent, messages, stream):
    asked = {"model": "m", "messages": messages}
    if not stream:
        reply = await agent.chat.completions.create(**asked)
        return reply.choices[0].message.content
    parts = []
    async for chunk in await agent.chat.completions.create(**asked, stream=True):
        parts += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(parts)


async def main():
    lines = ["I look.", "Found it.", "Bye."]
    async with (
        endpoint(load_embedded_tokenizer(), lambda it: lines[it.index % 3]) as bench,
        InterceptionServer() as server,
    ):
        config = TrainClientConfig(base_url=bench.url + "/v1")
        register(server, config)
        trace = Trace.model_construct(id="trace", nodes=[], calls=[], tools=[])
        session = RolloutSession(ModelContext("default", config), trace)
        secret, _ = server.register(session)
        assert isinstance(session.client, EndpointClient)
        url = f"http://127.0.0.1:{server.port}/v1"
        messages = [{"role": "user", "content": "Hi"}]
        async with AsyncOpenAI(base_url=url, api_key=secret, max_retries=0) as agent:
            for turn, line in enumerate(lines):
                text = await said_by(agent, messages, stream=turn == 1)
                assert text == line
                messages += [{"role": "assistant", "content": text}, messages[0]]
        (branch,) = trace.branches
        (ours,) = bench.endpoint.sessions.get("trace").session.trajectories()
        assert branch.token_ids == ours.input_ids.tolist()


asyncio.run(main())
"""


def test_verifiers_trace_is_the_endpoint_s_trajectory() -> None:
    """By the client alone, and by an OpenAI-SDK agent through verifiers' interception server."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        pytest.skip(
            "pip install --no-deps verifiers==0.4.0 anthropic docstring-parser tomli-w "
            f"(no {missing[0]})"
        )
    run_apart(_BEGIN + _CLIENT + _SERVER)
