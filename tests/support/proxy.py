"""`CountingProxy`: a reverse proxy between a router and a worker, which records all requests.

Invariants: bytes pass unchanged in both directions; if a client disconnects, the worker's
connection is closed too; `requests` has every request in the order of arrival. It runs in a thread
with its own event loop, so that tests of any loop can use it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from support.http import app_server, in_thread

_HOP_BY_HOP = frozenset(
    "connection keep-alive transfer-encoding te trailer upgrade host content-length "
    "content-encoding".split()
)


@dataclass(slots=True)
class SeenRequest:
    """One request as the worker got it. `status` of the answer; None while there is none, or
    where the client hung up. `answer`: the bytes of its body so far.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int | None = None
    hung_up: bool = False
    answer: bytearray = field(default_factory=bytearray)

    @property
    def routing_key(self) -> str | None:
        return self.headers.get("x-smg-routing-key")

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class CountingProxy:
    """`url` stands for the worker at `target`."""

    target: str
    url: str = ""
    requests: list[SeenRequest] = field(default_factory=list)

    def generations(self) -> list[SeenRequest]:
        return [seen for seen in list(self.requests) if seen.path == "/generate"]

    def clear(self) -> None:
        self.requests.clear()


@contextmanager
def counting_proxy(target: str) -> Iterator[CountingProxy]:
    """A proxy before the worker at `target` until the context closes."""
    with in_thread(_serving(CountingProxy(target))) as proxy:
        yield proxy


@asynccontextmanager
async def _serving(proxy: CountingProxy) -> AsyncIterator[CountingProxy]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False
    ) as session:
        app = web.Application(client_max_size=256 * 2**20)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await _pass_on(proxy, session, request)

        app.router.add_route("*", "/{path:.*}", handle)
        async with app_server(app, handler_cancellation=True, shutdown_timeout=1.0) as proxy.url:
            yield proxy


async def _pass_on(
    proxy: CountingProxy, session: aiohttp.ClientSession, request: web.Request
) -> web.StreamResponse:
    seen = SeenRequest(
        request.method,
        request.path,
        {name.lower(): value for name, value in request.headers.items()},
        await request.read(),
    )
    proxy.requests.append(seen)
    headers = {
        name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP
    }
    try:
        async with session.request(
            request.method,
            f"{proxy.target}{request.raw_path}",
            data=seen.body or None,
            headers=headers,
        ) as upstream:
            kept = {
                name: value
                for name, value in upstream.headers.items()
                if name.lower() not in _HOP_BY_HOP
            }
            if "Content-Encoding" in upstream.headers:
                kept["Content-Encoding"] = upstream.headers["Content-Encoding"]
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                seen.answer += chunk
                await response.write(chunk)
            seen.status = upstream.status  # before the client sees the end
            await response.write_eof()
            return response
    except (asyncio.CancelledError, ConnectionResetError):
        seen.status, seen.hung_up = None, True
        raise
    except aiohttp.ClientConnectionError as error:
        return web.Response(status=502, text=f"{proxy.target}: {error}")
