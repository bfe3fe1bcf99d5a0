"""`Transport`: one aiohttp session for all requests to an engine or its router.

Invariants:

- No POST is sent twice: aiohttp repeats only idempotent methods, and a redirect of a POST is not
  followed.
- The number of connections is not limited. Time limits apply only to single requests.
- Credentials in the engine's address are sent to that address only.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from toolroll.rollout.engine.engine_config import EngineConfig

NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError)
"""The exceptions that are raised if a request got no complete answer."""

_KEEP_ALIVE = 60.0
_DNS_CACHE = 10
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_HEAD_LINE = 8190
"""The maximum number of bytes in one header line of an answer (aiohttp's default; it allows 128
lines).
"""


class Answer(NamedTuple):
    """A complete answer with any status."""

    status: int
    body: bytes
    retry_after: str | None


class _Request(aiohttp.ClientRequest):
    """A request that refuses a connection on which unsolicited data has arrived. aiohttp would read
    this data as the answer.
    """

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        if conn.protocol is not None and conn.protocol.should_close:
            raise aiohttp.ClientConnectionResetError("unsolicited data on an idle connection")
        return await super().send(conn)


class Transport:
    """The HTTP session for an engine. It is opened by the first request, by the first request in
    another event loop, and by the first request after `close`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._generate = URL(f"{config.engine}/generate")
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attempt = self._limits(config.attempt_timeout)

    async def generate(
        self, body: bytes, routing_key: str, *, seconds: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return a context manager that posts `body` to `/generate`, with a limit of `seconds`. The
        answer can be streamed. Entering it and reading raise one of `NETWORK_ERRORS`.
        """
        limits = self._attempt if seconds >= self._config.attempt_timeout else self._limits(seconds)
        headers = {"x-smg-routing-key": routing_key, **self._authorized(self._config.engine)}
        session = await self._opened()
        return session.post(
            self._generate, data=body, headers=headers, timeout=limits, allow_redirects=False
        )

    async def ask(self, url: str, body: bytes | None = None, *, seconds: float) -> Answer:
        """Get any address, or post the JSON `body` to it, with a limit of `seconds`. Raise one of
        `NETWORK_ERRORS`.
        """
        method, limits = "GET" if body is None else "POST", self._limits(seconds)
        headers, session = self._authorized(url), await self._opened()
        async with session.request(
            method, url, data=body, headers=headers, timeout=limits, allow_redirects=body is None
        ) as response:
            return await whole(response)

    async def close(self) -> None:
        """Close all connections. Requests in flight raise one of `NETWORK_ERRORS`."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _opened(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the connections of an earlier loop are closed
            await self.close()
            self._loop = loop
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,  # the default of 100 halves the throughput of 256 episodes
                    keepalive_timeout=_KEEP_ALIVE,
                    ttl_dns_cache=_DNS_CACHE,
                    ssl=ssl.create_default_context() if self._generate.scheme == "https" else True,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(),
                max_line_size=_HEAD_LINE,
                max_field_size=_HEAD_LINE,
                request_class=_Request,
                trust_env=False,
            )
        return self._session

    def _limits(self, seconds: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=seconds, connect=self._config.connect_timeout)

    def _authorized(self, url: str) -> Mapping[str, str]:
        secret, engine = self._config.authorization, self._config.engine
        if secret is None or not (url == engine or url.startswith(f"{engine}/")):
            return {}
        return {"Authorization": secret.get_secret_value()}


async def whole(response: aiohttp.ClientResponse) -> Answer:
    """Read the body of `response` to its end and return the answer."""
    body = await response.read()
    return Answer(response.status, body, response.headers.get("Retry-After"))
