"""Small HTTP servers that answer like a router or a broken engine, as a test decides."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp import web
from anyio.from_thread import start_blocking_portal

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def app_server(app: web.Application, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """A server of `app` at the yielded address; `options` are those of aiohttp's runner."""
    runner = web.AppRunner(app, access_log=None, **{"shutdown_timeout": 0.1, **options})
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextmanager
def in_thread(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Open `context` on an event loop in a separate thread."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(context) as opened:
        yield opened


@asynccontextmanager
async def http_server(routes: Mapping[str, Handler], *, port: int = 0) -> AsyncIterator[str]:
    """A server at the yielded address; `routes` maps paths to handlers, all else is a 404."""
    app = web.Application(client_max_size=1 << 28)
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    async with app_server(app, port, handler_cancellation=True) as url:
        yield url


@asynccontextmanager
async def router_over(engine: str) -> AsyncIterator[str]:
    """A server that answers like smg with one worker, the engine at this address."""
    async with aiohttp.ClientSession() as session:

        async def generate(request: web.Request) -> web.StreamResponse:
            url, body = f"{engine}/generate", await request.read()
            async with session.post(url, data=body, headers=request.headers) as answer:
                return web.Response(body=await answer.read(), status=answer.status)

        workers = says({"workers": [{"url": engine, "runtime_type": "sglang"}]})
        async with http_server({"/workers": workers, "/generate": generate}) as url:
            yield url


def says(data: Any, *, status: int = 200) -> Handler:
    """A handler with one answer: bytes as they are, all else as JSON."""
    body = data if isinstance(data, bytes) else orjson.dumps(data)

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(body=body, status=status)

    return handle


def completion(ids: list[int], **meta: Any) -> dict[str, Any]:
    """An answer of SGLang's `/generate` that samples `ids`, to any request (it has no id).

    `meta` replaces fields of `meta_info`.
    """
    info = {
        "finish_reason": {"type": "stop", "matched": ids[-1]}
        if ids
        else {"type": "length", "length": 0},
        "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.5 - at, index, None] for at, index in enumerate(ids)],
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}] if ids else [],
        "cached_tokens": 0,
        **meta,
    }
    return {"text": "", "output_ids": ids, "meta_info": info}
