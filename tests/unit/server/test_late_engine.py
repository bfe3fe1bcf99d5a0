"""An endpoint that is there before its engine."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from support.episodes import opened_model
from support.served import CHAT, TEXT, USER

from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.endpoint.in_process import ToolrollClient
from toolroll.testing import EmbeddedEngine


@asynccontextmanager
async def not_started(tokenizer: Any, **config: Any) -> AsyncIterator[tuple[Endpoint, Any]]:
    """An endpoint, and its engine, which is not started yet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
    late = EmbeddedEngine(tokenizer, lambda request: "Hello.", port=port, context_length=777)
    given = {"backoff": 0.001, "retries": 0, **config}
    async with opened_model(f"http://127.0.0.1:{port}", tokenizer, config=given) as model:
        yield Endpoint(model, EndpointSettings(port=0)), late


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", None),
        ("/v1/models/toolroll", None),
        ("/tokenize", {"prompt": "Hi"}),
        (CHAT, {"messages": [USER]}),
        (TEXT, {"prompt": "Hi"}),
    ],
)
async def test_unknown_engine_facts_are_read_again(tokenizer: Any, path: str, body: Any) -> None:
    async with (
        not_started(tokenizer) as (endpoint, engine),
        EndpointServer(endpoint) as server,
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"{server.url}/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] is None
        async with engine:
            method = "GET" if body is None else "POST"
            async with http.request(method, server.url + path, json=body) as response:
                assert response.status == 200, await response.text()
            assert endpoint.model_info.context_length == 777


@pytest.mark.parametrize("set_length", [None, 512])
async def test_so_they_are_in_the_same_process(tokenizer: Any, set_length: int | None) -> None:
    """Also if the configuration sets the context length."""
    async with not_started(tokenizer, context_length=set_length) as (endpoint, engine), endpoint:
        assert endpoint.model_info.context_length == set_length
        async with engine:
            create: Any = ToolrollClient(endpoint, session="s").chat.completions.create
            await create(model="m", messages=[USER])
            assert endpoint.model_info.context_length == (set_length or 777)
            assert endpoint.model_info.model_path == "embedded"
