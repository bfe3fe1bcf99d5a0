"""An endpoint that is there before its engine."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
import pytest

from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.endpoint.in_process import ToolrollClient
from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.model.model import Model
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.testing import EmbeddedEngine

USER: Any = {"role": "user", "content": "Hi"}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def not_started(tokenizer: Any, port: int, **config: Any) -> Model:
    """A served model whose engine will listen on `port`."""
    template, address = ChatTemplate(tokenizer), f"http://127.0.0.1:{port}"
    engine = Engine(EngineConfig(engine=address, backoff=0.001, retries=0, **config))
    return Model(engine, template, get_parser("hermes", template.encoder.control))


@pytest.mark.parametrize(
    "first",
    ["v1/models", "v1/models/toolroll", "tokenize", "v1/chat/completions", "v1/completions"],
)
async def test_the_engines_facts_are_asked_for_again_where_they_were_unknown(
    tokenizer: Any, first: str
) -> None:
    port = free_port()
    async with not_started(tokenizer, port) as served:
        endpoint = Endpoint(served, EndpointSettings(port=0))
        async with EndpointServer(endpoint) as server, aiohttp.ClientSession() as http:
            async with http.get(f"{server.url}/v1/models") as response:
                assert (await response.json())["data"][0]["max_model_len"] is None
            async with EmbeddedEngine(
                tokenizer, lambda request: "Hello.", port=port, context_length=777
            ):
                body = (
                    None
                    if "models" in first
                    else {"messages": [USER]}
                    if "chat" in first
                    else {"prompt": "Hi"}
                )
                async with http.request(
                    "GET" if body is None else "POST", f"{server.url}/{first}", json=body
                ) as response:
                    assert response.status == 200, await response.text()
                assert endpoint.model_info.context_length == 777


@pytest.mark.parametrize("set_length", [None, 512])
async def test_so_they_are_in_the_same_process(tokenizer: Any, set_length: int | None) -> None:
    """Also if the configuration sets the context length."""
    port = free_port()
    served = not_started(tokenizer, port, context_length=set_length)
    async with served, Endpoint(served) as endpoint:
        assert endpoint.model_info.context_length == set_length
        async with EmbeddedEngine(
            tokenizer, lambda request: "Hello.", port=port, context_length=777
        ):
            client = ToolrollClient(endpoint, session="s")
            await client.chat.completions.create(model="m", messages=[USER])
            assert endpoint.model_info.context_length == (set_length or 777)
            assert endpoint.model_info.model_path == "embedded"
