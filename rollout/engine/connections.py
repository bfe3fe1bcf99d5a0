"""`Connections`: keep-alive connections to one server, for the one request that a rollout makes a million times.

A general client makes a hundred objects a request (URL, headers, cookies, timers, tasks), a quarter of what a turn costs (ADR 0010).
Here a request is one write, and `httptools` reads the answer. Invariants: a connection carries one request at a time; nothing is sent
twice; a connection whose answer was given up, that said more than it was asked, or that the server will close, carries no other.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import httptools
from aiohappyeyeballs import start_connection
from yarl import URL

_KEEP = 60.0
"""Seconds for which a connection is kept that nobody uses."""
_RESOLVED = 10.0
"""Seconds for which the addresses of a host are believed."""
_SECOND_FAMILY = 0.25
"""Seconds after which the next address is tried beside the one before (RFC 8305)."""


class Answer(NamedTuple):
    """What came: the status, the headers by their names in lower case, the body."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Connections:
    """As many connections to the server of `url` as are wanted at once. For one event loop at a time."""

    def __init__(self, url: str, *, connect_timeout: float) -> None:
        parts = URL(url)
        self._host, self._port = parts.raw_host or "", parts.port or 80
        self._secure = parts.scheme == "https"
        self._tls: ssl.SSLContext | None = None
        self._path = parts.raw_path.rstrip("/").encode()
        where = parts.raw_authority.rpartition("@")[2]
        self._always = _lines({"Host": where, "Accept": "*/*", "Accept-Encoding": "identity", **_authorization(parts)})
        self._connect_timeout = connect_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: deque[_Connection] = deque()  # the one used last on the right
        self._all: set[_Connection] = set()
        self.closings = 0
        """How often it was closed: who goes on from a failure sees whether somebody wanted it."""
        self._lookup: asyncio.Future[list[Any]] | None = None
        self._looked_up = 0.0

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], *, seconds: float) -> Answer:
        """Post `body` to `path`. Redirects are answers like any other.

        Raises `TimeoutError` after so many `seconds`, `ConnectionError` where no connection can be made, or where one breaks off
        before the answer is whole, `ValueError` for a header that cannot be sent.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the connections of the loop before, if there was one, died with it
            self._loop, self._lookup, self._idle, self._all = loop, None, deque(), set()
        end = loop.time() + seconds
        head = b"POST %s%s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n" % (
            self._path,
            path.encode(),
            self._always,
            _lines(headers),
            len(body),
        )
        connection = self._kept(loop.time()) or await self._connected(loop, min(self._connect_timeout, seconds))
        try:
            answer = await connection.ask(head + body, end)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            connection.since = loop.time()
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close them all; whoever waits for an answer gets a `ConnectionError`."""
        self.closings += 1
        if self._loop is not None and not self._loop.is_closed():
            for connection in list(self._all):
                connection.close()
        self._all.clear()
        self._idle.clear()

    def _kept(self, now: float) -> _Connection | None:
        while self._idle and now - self._idle[0].since > _KEEP:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connected(self, loop: asyncio.AbstractEventLoop, seconds: float) -> _Connection:
        closings = self.closings
        if self._secure and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(seconds):
                found = await start_connection(await self._addresses(loop), happy_eyeballs_delay=_SECOND_FAMILY)
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._all, secure=self._secure),
                    sock=found,
                    ssl=self._tls,
                    server_hostname=self._host if self._secure else None,
                )
        except TimeoutError as error:
            raise TimeoutError(f"no connection to {self._host}:{self._port} in {seconds:g} s") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            raise ConnectionError(f"no connection to {self._host}:{self._port}: {_why(error)}") from error
        if self.closings != closings:
            connection.close()
            raise ConnectionAbortedError("closed while the connection was made")
        return connection

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> list[Any]:
        """Those of the host, looked up once for all who ask within some seconds: a thousand episodes begin at once."""
        lookup = self._lookup
        old = loop.time() - self._looked_up > _RESOLVED
        if lookup is None or (lookup.done() and (old or lookup.cancelled() or lookup.exception())):
            lookup = self._lookup = asyncio.ensure_future(loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
            lookup.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may end when all have given it up
            self._looked_up = loop.time()
        await asyncio.wait([lookup])
        if lookup.cancelled():
            raise OSError("its address was not looked up to the end")
        if not lookup.result():
            raise OSError("it has no address")
        return lookup.result()


class _Connection(asyncio.Protocol):
    """One connection. The methods with `on_` are called by the parser.

    What is over is let go of at once: with its parser it is a reference cycle, and the collector comes seldom in a run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, everyone: set[_Connection], *, secure: bool) -> None:
        self.since = 0.0
        self._loop = loop
        self._everyone = everyone
        self._secure = secure
        self._transport: asyncio.Transport | None = None  # None: closed, or not yet open
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._asked: asyncio.Future[Answer] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._status = 0
        self._keep_alive = self._in_body = False

    @property
    def reusable(self) -> bool:
        """Whether it can carry another request."""
        transport = self._transport
        return transport is not None and self._keep_alive and not transport.is_closing() and not transport.get_write_buffer_size()

    def ask(self, request: bytes, end: float) -> asyncio.Future[Answer]:
        """Send `request`; its answer, or an error at the loop's time `end`."""
        asked = self._asked = self._loop.create_future()
        if self._transport is None:
            self._fail(ConnectionResetError("the connection was closed before anything was sent"))
            return asked
        self._timer = self._loop.call_at(end, self._late)
        self._transport.write(request)
        return asked

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    def _late(self) -> None:
        self._fail(TimeoutError("no answer in time"))

    def _fail(self, error: Exception) -> None:
        """Give up what was asked, with `error`, and the connection."""
        asked = self._over()
        if asked is not None and not asked.done():
            asked.set_exception(error)
        self.close()

    def _over(self) -> asyncio.Future[Answer] | None:
        """Nothing is asked any more; what was."""
        if self._timer is not None:
            self._timer.cancel()
        asked, self._asked, self._timer = self._asked, None, None
        self._headers, self._body, self._in_body = {}, [], False
        return asked

    # --- the transport's calls -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        self._everyone.add(self)

    def eof_received(self) -> None:
        if self._in_body and not self._headers.keys() & {b"content-length", b"transfer-encoding"}:
            self.on_message_complete()  # as long as the connection
        self._fail(ConnectionResetError("the connection was closed before the answer was whole"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None
        self._everyone.discard(self)
        self._fail(ConnectionResetError(f"the connection was closed before the answer was whole{f': {exc}' if exc else ''}"))

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"the answer is no HTTP: {error}: {data[:80]!r}"))

    # --- the parser's calls ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._asked is None:
            self.close()  # more is said than was asked

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # else a trailer
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()
        # How much of a request is still to be sent is not told under TLS: an answer that refuses it may come before its end.
        self._keep_alive = self._parser.should_keep_alive() and not (self._secure and self._status >= 400)
        self._in_body = self._status >= 200

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        headers, body = self._headers, self._body
        if self._status < 200:  # the answer is still to come
            self._headers = {}
            return
        asked = self._over()
        if asked is not None and not asked.done():
            asked.set_result(Answer(self._status, headers, body[0] if len(body) == 1 else b"".join(body)))


def _why(error: OSError | UnicodeError) -> str:
    """In words: asyncio's own are "Connect call failed"."""
    number = 0 if isinstance(error, UnicodeError | ssl.SSLError) else error.errno or 0
    return os.strerror(number) if number > 0 else str(error)


def _lines(headers: Mapping[str, str]) -> bytes:
    found = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if found.count("\r") != len(headers) or found.count("\n") != len(headers) or "\0" in found:
        raise ValueError(f"a header must be one line: {dict(headers)!r}")
    return found.encode()


def _authorization(url: URL) -> dict[str, str]:
    if url.user is None:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()}
