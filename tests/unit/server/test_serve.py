"""The start of `toolroll serve`: what is refused, and an engine that is not there yet."""

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from support.client import StartingEngine
from support.commands import toolroll
from support.episodes import opened_model
from support.served import CHAT, USER

from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.endpoint.http.serve import serve
from toolroll.endpoint.in_process import ToolrollClient
from toolroll.rollout.errors import UsageError
from toolroll.rollout.settings import RolloutArgs
from toolroll.testing import EmbeddedEngine

COMMAND = ("serve", "--model", "embedded", "--engine", "http://127.0.0.1:9", "--port", "0")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key-env"),
        (["--sampling-params", '{"temprature": 1}'], "--sampling-params.*'temperature'"),
        (["--sampling-params", '{"n": 2}'], "--sampling-params.*n is set by each request"),
        (["--server-tools", "never"], "--server-tools.*refuse.*drop"),
        ([], r"http://127\.0\.0\.1:9"),
    ],
)
def test_what_is_wrong_is_refused_at_the_start(flags: list[str], words: str) -> None:
    """Under its flag, before the engine, which is not there, is looked for."""
    with pytest.raises(UsageError, match=words) as refused:
        toolroll(*COMMAND, *flags)
    assert ("127.0.0.1:9" in str(refused.value)) == (not flags)


async def test_it_waits_for_the_engine(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    ready: list[str] = []

    def stop(url: str) -> None:
        ready.append(url)
        signal.raise_signal(signal.SIGTERM)

    engine = StartingEngine(tokenizer)
    async with engine:
        args = RolloutArgs(model="embedded", engine=engine.url, engine_timeout=0.05)
        await serve(args, EndpointSettings(port=0), stop)
        assert engine.checks == 3  # down, up, and once more before the start
    [waiting, _] = [record.getMessage() for record in caplog.records if "engine" in record.name]
    assert "/health answers 503" in waiting and waiting.endswith("up to 0.05 s")
    assert len(ready) == 1


async def test_a_signal_ends_the_wait_for_the_engine(tokenizer: Any) -> None:
    class Down(StartingEngine):
        @property
        def healthy(self) -> bool:
            signal.raise_signal(signal.SIGTERM)
            return False

        @healthy.setter
        def healthy(self, value: bool) -> None:
            pass

    ready: list[str] = []
    async with Down(tokenizer) as engine:
        args = RolloutArgs(model="embedded", engine=engine.url, engine_timeout=600)
        await serve(args, EndpointSettings(port=0), ready.append)
    assert ready == []


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
        ("/tokenize", {"prompt": "Hi"}),
        (CHAT, {"messages": [USER]}),
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
    async with not_started(tokenizer, context_length=set_length) as (endpoint, engine), endpoint:
        assert endpoint.model_info.context_length == set_length
        async with engine:
            create: Any = ToolrollClient(endpoint, session="s").chat.completions.create
            await create(model="m", messages=[USER])
            assert endpoint.model_info.context_length == (set_length or 777)
            assert endpoint.model_info.model_path == "embedded"


def test_flags_of_engine_and_collector_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[RolloutArgs] = []

    async def serve(args: RolloutArgs, *others: object) -> None:
        given.append(args)

    monkeypatch.setattr("toolroll.endpoint.http.serve.serve", serve)
    for flags in ([], ["--no-pace-gc", "--engine-timeout", "60"]):
        assert toolroll("serve", "--model", "embedded", *flags).exit_code == 0
    assert [(args.engine_timeout, args.pace_gc) for args in given] == [(0.0, True), (60.0, False)]
