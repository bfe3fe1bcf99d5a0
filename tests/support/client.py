"""Connect our engine client to the embedded engine, or to a small server of a test."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from support.http import Handler, http_server

from toolroll.rollout.engine import EncodedRequest, Engine, EngineConfig, ModelInfo
from toolroll.rollout.types import Completion, GenerateRequest
from toolroll.testing import EmbeddedEngine, echo

INFO = ModelInfo(context_length=1000, vocab_size=5000)


class Pauses(list[float]):
    """A `sleep` that takes no time and keeps what was asked for."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


class StartingEngine(EmbeddedEngine):
    """An engine whose first health check fails, as while it starts. `checks` counts them."""

    checks = 0

    @property
    def healthy(self) -> bool:
        self.checks += 1
        return self.checks > 1

    @healthy.setter
    def healthy(self, value: bool) -> None:
        pass


class Watched(Engine):
    """An engine client that keeps the parts of each turn."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.parts: list[Completion] = []

    async def generate(self, request: GenerateRequest, **more: Any) -> Completion:
        part = await super().generate(request, **more)
        self.parts.append(part)
        return part


def request(ids: Any = (5, 6, 7), *, session: str = "s", **fields: Any) -> GenerateRequest:
    params = fields.pop("sampling_params", {"max_new_tokens": 16})
    kind = EncodedRequest if "input_ids_json" in fields else GenerateRequest
    return kind(np.array(ids, dtype=np.int32), params, session, **fields)


@asynccontextmanager
async def client(
    url: str, *, model_info: ModelInfo | None = INFO, sleep: Any = None, **config: Any
) -> AsyncIterator[Engine]:
    async with Engine(
        EngineConfig(engine=url, **config),
        model_info=model_info,
        sleep=Pauses() if sleep is None else sleep,
    ) as engine:
        yield engine


@asynccontextmanager
async def client_of(routes: Mapping[str, Handler], **config: Any) -> AsyncIterator[Engine]:
    """A client of a server with these routes."""
    async with http_server(routes) as url, client(url, **config) as calls:
        yield calls


@asynccontextmanager
async def answering(generate: Handler, **config: Any) -> AsyncIterator[Engine]:
    """A client of a server whose `/generate` is `generate`."""
    async with client_of({"/generate": generate}, **config) as calls:
        yield calls


@asynccontextmanager
async def embedded(
    tokenizer: Any, policy: Any = echo, *, config: dict[str, Any] | None = None, **engine: Any
) -> AsyncIterator[tuple[EmbeddedEngine, Engine]]:
    async with (
        EmbeddedEngine(tokenizer, policy, **engine) as served,
        client(served.url, **(config or {})) as calls,
    ):
        yield served, calls


def flaky(*answers: web.Response | dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """A handler that returns `answers` in order and then repeats the last one, and the bodies."""
    seen: list[dict[str, Any]] = []

    async def handle(http: web.Request) -> web.StreamResponse:
        seen.append(orjson.loads(await http.read()))
        answer = answers[min(len(seen), len(answers)) - 1]
        if isinstance(answer, dict):
            return web.Response(body=orjson.dumps(answer))
        return web.Response(status=answer.status, body=answer.body, headers=dict(answer.headers))

    return seen, handle


def refusal(status: int, body: Any = None, **headers: str) -> web.Response:
    return web.Response(
        status=status, body=body if isinstance(body, bytes) else orjson.dumps(body), headers=headers
    )
