"""Managed sessions of Atropos' `ServerManager`: which server they use, and what they share. The
mirror types have the fields of atroposlib 0.4.0 that are read; tests/contract/test_atropos.py has
the real ones.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.atropos_server import atropos_server
from support.endpoints import Bench, endpoint

from toolroll.endpoint.in_process import DummyManagedServer
from toolroll.rollout.errors import UsageError
from toolroll.testing import Reply, load_embedded_tokenizer
from toolroll.trainers.atropos import ManagedServers

USER: Any = {"role": "user", "content": "Hi"}


def manager(*servers: Any, **options: Any) -> Any:
    """What is read of a `ServerManager`."""
    given = {"use_proxy": False, "tool_parser": None, **options}
    servers_manager = SimpleNamespace(servers=list(servers), **given)
    servers_manager.managed_server = ManagedServers(servers_manager).managed_server
    return servers_manager


@asynccontextmanager
async def benches(count: int, policy: Any = lambda request: "Hello.") -> AsyncIterator[list[Bench]]:
    async with AsyncExitStack() as stack:
        opened = [endpoint(load_embedded_tokenizer(), policy) for _ in range(count)]
        yield [await stack.enter_async_context(it) for it in opened]


async def held(benches: Sequence[Bench], *, total: int) -> list[int]:
    """How many requests each engine holds, once there are `total`."""
    while (counts := [bench.engine.held for bench in benches]) and sum(counts) < total:
        await asyncio.sleep(0.01)
    return counts


async def ask(managers: Any, **given: Any) -> None:
    async with managers.managed_server(**given) as managed:
        await managed.chat_completion(messages=[USER])


def sampled(node: Any) -> list[int]:
    return [token for token in node.masked_tokens if token != -100]


async def test_the_first_server_with_the_most_free_slots_is_used() -> None:
    release = asyncio.Event()
    hold = lambda request: Reply("Hello.", hold=release, hold_after=1)
    async with benches(3, hold) as (first, second, third):
        servers = manager(
            atropos_server(first.engine.url, slots=1),
            atropos_server(second.engine.url),
            atropos_server(third.engine.url),
        )
        asking = []
        for busy in ([0, 1, 0], [0, 1, 1], [0, 2, 1], [0, 2, 2]):
            asking.append(asyncio.ensure_future(ask(servers)))
            assert await held((first, second, third), total=sum(busy)) == busy
        release.set()
        await asyncio.gather(*asking)


async def test_an_unhealthy_server_is_left_out_and_an_address_pins_one() -> None:
    async with benches(2) as (first, second):
        servers = manager(
            atropos_server(first.engine.url, slots=8), atropos_server(second.engine.url)
        )
        servers.servers[0].server_healthy = False
        await ask(servers)
        assert (len(first.engine.log), len(second.engine.log)) == (0, 1)
        await ask(servers, base_url=f"{first.engine.url}/v1")
        assert (len(first.engine.log), len(second.engine.log)) == (1, 1)
        servers.servers[1].server_healthy = False  # none is healthy: the first, as published
        async with servers.managed_server() as managed:
            assert managed.server is servers.servers[0]
        with pytest.raises(UsageError, match="no server of this manager"):
            await ask(servers, base_url="http://elsewhere/v1")


async def test_sessions_share_a_connection_and_keep_their_own_tokens() -> None:
    async with benches(1, lambda request: f"Reply {request.index}.") as (bench,):
        servers = manager(atropos_server(bench.engine.url))
        tokenizer = load_embedded_tokenizer()
        async with servers.managed_server(tokenizer=tokenizer) as first:
            async with servers.managed_server(tokenizer=tokenizer) as second:
                assert first.endpoint.model is second.endpoint.model
                await second.chat_completion(messages=[USER])
            await first.chat_completion(messages=[USER])  # still open
            [node] = first.get_state()["nodes"]
            assert sampled(node) == bench.engine.log[1].output_ids
        async with servers.managed_server(tokenizer=tokenizer) as third:  # opened again
            assert third.endpoint.model is not first.endpoint.model
            await third.chat_completion(messages=[USER])


class OpenAIServer:
    """A server of OpenAI's type, by its name."""

    server_healthy = True

    def __init__(self, bench: Bench) -> None:
        self.sem = asyncio.Semaphore(1)
        self._client = bench.client(None)

    async def chat_completion(self, **kwargs: Any) -> Any:
        return await self._client.chat.completions.create(**{"model": "m", **kwargs})


async def test_what_serves_no_token_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy always, and a server unless it is allowed."""
    async with benches(1) as (bench,):
        with pytest.raises(UsageError, match="proxy"):
            await ask(manager(atropos_server(bench.engine.url), use_proxy=True))
        servers = manager(OpenAIServer(bench))
        monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
        with pytest.raises(NotImplementedError, match="no token ids"):
            await ask(servers)
        monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "true")
        async with servers.managed_server() as managed:
            assert isinstance(managed, DummyManagedServer)
            await managed.chat_completion(messages=[USER])
            [node] = managed.get_state()["nodes"]
            assert sampled(node) == []
