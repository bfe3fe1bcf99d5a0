"""Use the embedded engine over plain HTTP, for tests of the engine itself and not of our client."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import aiohttp
from support.wire import Answer, Wire

from toolroll.testing import (
    EmbeddedEngine,
    LoggedRequest,
    Policy,
    PolicyRequest,
    Reply,
    echo,
    load_embedded_tokenizer,
)

_embedded = cache(load_embedded_tokenizer)


@asynccontextmanager
async def wired(
    policy: Policy = echo, *, tokenizer: Any = None, **settings: Any
) -> AsyncIterator[tuple[EmbeddedEngine, Wire]]:
    """An embedded engine with `settings`, and a connection to it."""
    async with (
        EmbeddedEngine(tokenizer or _embedded(), policy, **settings) as engine,
        aiohttp.ClientSession() as http,
    ):
        yield engine, Wire(http, engine.url)


async def answer_of(
    policy: Policy = echo,
    prompt: Sequence[int] = (300,),
    *,
    engine: Mapping[str, Any] | None = None,
    **request: Any,
) -> tuple[Answer, list[LoggedRequest]]:
    """The answer to one request to an engine of its own, and that engine's log."""
    async with wired(policy, **(engine or {})) as (served, wire):
        return await wire.generate(prompt, **request), served.log


def says(said: str | Reply | list[int]) -> Policy:
    """The policy that always says the same: a text, exact ids, or a whole reply."""
    reply = Reply(output_ids=said) if isinstance(said, list) else said
    return lambda request: reply


class Held:
    """A policy whose answers of `ids` stand at token `after` until `release`."""

    def __init__(self, ids: list[int], after: int) -> None:
        self._ids, self._after = ids, after
        self._event = asyncio.Event()

    def __call__(self, request: PolicyRequest) -> Reply:
        return Reply(output_ids=self._ids, hold=self._event, hold_after=self._after)

    def release(self) -> None:
        self._event.set()


async def held_call(
    engine: EmbeddedEngine, call: Coroutine[Any, Any, Answer]
) -> asyncio.Task[Answer]:
    """Start `call`, and wait until the engine holds its answer."""
    task = asyncio.create_task(call)
    await engine.until(lambda served: served.held == 1)
    return task


def session(name: str) -> dict[str, Any]:
    """The arguments of a request of the session `name`."""
    return {"headers": {"x-smg-routing-key": name}}


async def events(wire: Wire, ids: Sequence[int], **fields: Any) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    body, last = {"input_ids": list(ids), "return_logprob": True, "stream": True, **fields}, b""
    async with wire.http.post(f"{wire.url}/generate", json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
            last = line.strip() or last
    assert last == b"data: [DONE]"
