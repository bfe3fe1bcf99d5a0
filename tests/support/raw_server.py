"""A raw server: a test decides each byte of each connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
from support.http import completion

Talk = Callable[["Talker"], Awaitable[None]]


def ok(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"HTTP/1.1 200 OK\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def sampled(*ids: int) -> bytes:
    """The body of SGLang's answer that samples `ids`."""
    return orjson.dumps(completion(list(ids)))


class Talker:
    """The server's side of one connection; `number` counts connections from 0."""

    def __init__(
        self, server: TalkingServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        self.number = len(server.talkers)
        self.posts = 0

    async def hear(self) -> Any:
        """The JSON of the next request. Its head and body are kept in the server's `heard`."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(b"0" + head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = orjson.loads(await self.reader.readexactly(length) or b"null")
        self.server.heard.append((head.split(b"\r\n")[0].decode(), head, body))
        self.server.changed.set()
        return body

    async def hear_post(self) -> None:
        """Hear the next POST. What is to GET before it, such as the model's name, is not there."""
        while await self.hear() is None:
            await self.say(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        self.posts += 1

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        await self.reader.read()


class TalkingServer:
    """`heard`: request line, head and JSON of each request, in their order."""

    def __init__(self) -> None:
        self.url = ""
        self.talkers: list[Talker] = []
        self.heard: list[tuple[str, bytes, Any]] = []
        self.changed = asyncio.Event()

    def rids(self, path: str) -> list[str]:
        return [body["rid"] for line, _, body in self.heard if line.split()[1] == path]

    async def until(self, done: Callable[[TalkingServer], bool]) -> None:
        while not done(self):
            self.changed.clear()
            await self.changed.wait()


@asynccontextmanager
async def talking(
    talk: Talk, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[TalkingServer]:
    """A server that does `talk` on each connection, and then closes it."""
    made = TalkingServer()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talker = Talker(made, reader, writer)
        made.talkers.append(talker)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await talk(talker)
        writer.close()

    server = await asyncio.start_server(accept, host, port, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    made.url = f"{'https' if tls else 'http'}://{host}:{port}"
    try:
        yield made
    finally:
        server.close()
