"""Connections: each request has its own answer, or an error that says why there is none, whatever a server does."""

from __future__ import annotations

import asyncio
import gc
import pickle
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

from toolroll.rollout.engine.connections import Answer, Connections

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Talk = Callable[["Talker"], Awaitable[None]]


class Talker:
    """The server's side of one connection; `number` counts connections from 0."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number, self.reader, self.writer = number, reader, writer
        self.heads: list[bytes] = []

    async def hear(self) -> bytes:
        """The next request's body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        return await self.reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


class Server:
    def __init__(self) -> None:
        self.url = ""
        self.talkers: list[Talker] = []


@asynccontextmanager
async def serving(talk: Talk, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """A server that does `talk` on each connection, and then closes it."""
    made = Server()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talker = Talker(len(made.talkers), reader, writer)
        made.talkers.append(talker)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await talk(talker)
        writer.close()

    server = await asyncio.start_server(accept, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    made.url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        yield made
    finally:
        server.close()


async def echo(talker: Talker) -> None:
    while True:
        body = await talker.hear()
        await talker.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


async def post(connections: Connections, body: bytes = b"x", *, seconds: float = 20.0, **headers: str) -> Answer:
    return await connections.post("/generate", body, headers, seconds=seconds)


def once(said: bytes) -> Talk:
    """Says it after each request, and closes after the first one."""

    async def talk(talker: Talker) -> None:
        await talker.hear()
        await talker.say(said)

    return talk


# --- what goes well --------------------------------------------------------------------------------------------------


async def test_requests_one_after_the_other_share_a_connection_and_those_at_once_do_not() -> None:
    async with serving(echo) as server:
        connections = Connections(server.url, connect_timeout=10)
        for body in (b"", b"one", b"2" * 300_000):
            assert (await post(connections, body)).body == body
        assert len(server.talkers) == 1
        bodies = [b"%d" % number for number in range(40)]
        assert [answer.body for answer in await asyncio.gather(*(post(connections, body) for body in bodies))] == bodies
        assert len(server.talkers) == 40
        await asyncio.gather(*(post(connections, body) for body in bodies))
        assert len(server.talkers) == 40
        connections.close()


async def test_what_is_sent() -> None:
    async with serving(echo) as server:
        url = server.url.replace("http://", "http://me:se%20cret@")
        await post(Connections(f"{url}/base", connect_timeout=10), b"body", **{"X-Key": "Zoë"})
        (head,) = server.talkers[0].heads
    first, *lines = head.decode().strip().split("\r\n")
    assert first == "POST /base/generate HTTP/1.1"
    assert dict(line.split(": ", 1) for line in lines) == {
        "Host": server.url.removeprefix("http://"),
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Authorization": "Basic bWU6c2UgY3JldA==",
        "X-Key": "Zoë",
        "Content-Length": "4",
    }


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"HTTP/1.1 503 No\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy", (503, {b"retry-after": b"3"}, b"busy")),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n", (200, {}, b"abcde")),
        (
            b"HTTP/1.1 503 No\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nRetry-After: 9\r\n\r\n",
            (503, {b"retry-after": b"3"}, b"a"),
        ),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, (200, {}, b"ok")),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", (200, {}, b"until the end")),
        (b"HTTP/1.0 200 OK\r\n\r\n", (200, {}, b"")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, {}, b"")),
        (b"HTTP/1.1 307 Elsewhere\r\nLocation: /there\r\nContent-Length: 0\r\n\r\n", (307, {b"location": b"/there"}, b"")),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_answers_of_every_shape_in_pieces_of_any_length(said: bytes, answer: tuple[Any, ...], piece: int) -> None:
    async def talk(talker: Talker) -> None:
        await talker.hear()
        for at in range(0, len(said), piece):
            await talker.say(said[at : at + piece])
            await asyncio.sleep(0)

    async with serving(talk) as server:
        status, headers, body = await post(Connections(server.url, connect_timeout=10))
    kept = {name: value for name, value in headers.items() if name not in (b"content-length", b"transfer-encoding", b"link")}
    assert (status, kept, body) == answer


def trusted(monkeypatch: pytest.MonkeyPatch, folder: Path) -> ssl.SSLContext:
    """A server's context, of an authority that is the system's only one from now on."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    return context


async def test_over_tls_with_the_systems_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with serving(echo, tls=trusted(monkeypatch, tmp_path)) as server:
        connections = pickle.loads(pickle.dumps(Connections(server.url, connect_timeout=10)))  # none is made yet
        assert (await post(connections, b"safe" * 50_000)).body == b"safe" * 50_000
        assert (await post(connections, b"again")).body == b"again"
        assert len(server.talkers) == 1
        connections.close()
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            await post(Connections(server.url, connect_timeout=10))


def test_on_uvloop() -> None:
    async def play() -> list[bytes]:
        async with serving(echo) as server:
            connections = Connections(server.url, connect_timeout=10)
            try:
                return [(await post(connections, body)).body for body in (b"one", b"2" * 300_000)]
            finally:
                connections.close()

    assert uvloop.run(play()) == [b"one", b"2" * 300_000]


async def test_nothing_over_waits_for_the_garbage_collector() -> None:
    """Which comes seldom in a run, and would find answers and requests of megabytes."""
    gc.collect()
    gc.disable()
    began = time.monotonic()
    try:
        async with serving(once(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")) as server:
            connections = Connections(server.url, connect_timeout=10)
            for _ in range(3):
                await post(connections)
        async with serving(lambda talker: talker.reader.read()) as server:
            with suppress(TimeoutError):
                await post(Connections(server.url, connect_timeout=10), seconds=0.05)
        async with serving(echo) as server:
            connections = Connections(server.url, connect_timeout=10)
            await post(connections)
            assert [connection._asked for connection in connections._idle] == [None], "an idle connection holds its last answer"
            connections.close()
        while found := [one for one in gc.get_objects() if type(one).__name__ == "_Connection"]:
            assert time.monotonic() < began + 240, f"{len(found)} connections that are closed are held"
            found.clear()
            await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_a_host_with_several_addresses_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    loop = asyncio.get_running_loop()

    async def lookup(host: str, port: int, **how: Any) -> list[Any]:
        asked.append((host, port))
        await asyncio.sleep(0)
        dead = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))  # refused, so that the next one is tried
        return [dead, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async with serving(echo) as server:
        monkeypatch.setattr(loop, "getaddrinfo", lookup)
        connections = Connections(server.url.replace("127.0.0.1", "engine.test"), connect_timeout=10)
        await asyncio.gather(*(post(connections) for _ in range(20)))
        connections.close()
    assert asked == [("engine.test", int(server.url.rpartition(":")[2]))]


async def test_a_lookup_that_was_cancelled_is_done_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, lookups = asyncio.get_running_loop(), list[asyncio.Task[Any]]()
    real = loop.getaddrinfo

    async def lookup(host: str, port: int, **how: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        lookups.append(task)
        return await (asyncio.sleep(60) if len(lookups) == 1 else real("127.0.0.1", port, **how))

    async with serving(echo) as server:
        monkeypatch.setattr(loop, "getaddrinfo", lookup)
        connections = Connections(server.url, connect_timeout=10)
        waiting = asyncio.create_task(post(connections))
        while not lookups:
            await asyncio.sleep(0.01)
        lookups[0].cancel()
        with pytest.raises(ConnectionError, match="not looked up to the end"):
            await waiting
        assert (await post(connections)).status == 200
        connections.close()


@pytest.mark.parametrize(("host", "asked"), [("straße.test", "xn--strae-oqa.test"), ("[::1]", "::1"), ("a" * 70, "a" * 70)])
async def test_the_host_that_is_asked_for(host: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []

    async def lookup(host: str, port: int, **how: Any) -> list[Any]:
        hosts.append(host)
        host.encode("idna")
        raise OSError("nowhere")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    with pytest.raises(ConnectionError, match="no connection to"):
        await post(Connections(f"http://{host}:8000", connect_timeout=10))
    assert hosts == [asked]


def test_another_event_loop_opens_connections_of_its_own() -> None:
    made = Connections("http://127.0.0.1:1", connect_timeout=10)

    async def play() -> bytes:
        async with serving(echo) as server:
            made._port = int(server.url.rpartition(":")[2])
            return (await post(made, b"here")).body

    assert [asyncio.run(play()), asyncio.run(play())] == [b"here", b"here"]
    made.close()  # what died with its loop is no mistake


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", "closed before the answer was whole"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "closed before the answer was whole"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "closed before the answer was whole"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", "closed before the answer was whole"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "closed before the answer was whole"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", "the answer is no HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the answer is no HTTP.*SSH-2.0"),
    ],
)
async def test_an_answer_that_is_none(said: bytes, error: str) -> None:
    async with serving(once(said)) as server:
        with pytest.raises(ConnectionError, match=error):
            await post(Connections(server.url, connect_timeout=10))


@pytest.mark.parametrize(
    "said",
    [
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstray",
        OK + b"stray",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
)
async def test_a_connection_that_said_more_or_is_to_end_carries_no_other_request(said: bytes) -> None:
    async def talk(talker: Talker) -> None:
        await talker.hear()
        await talker.say(said)
        await talker.hear()  # it would be open for another one
        await talker.say(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong")

    async with serving(talk) as server:
        connections = Connections(server.url, connect_timeout=10)
        assert [(await post(connections)).body for _ in range(3)] == [b"ok"] * 3
        assert len(server.talkers) == 3
        connections.close()


async def test_what_comes_late_or_unasked_reaches_nobody() -> None:
    said = asyncio.Event()

    async def talk(talker: Talker) -> None:
        body = await talker.hear()
        await talker.say(OK)
        if body == b"stray":
            await talker.say(b"HTTP/1.1 408 Idle\r\nContent-Length: 5\r\n\r\nstray")
            said.set()
        await talker.reader.read()

    async with serving(talk) as server:
        connections = Connections(server.url, connect_timeout=10)
        assert (await post(connections, b"stray")).status == 200
        await said.wait()
        while connections._all:
            await asyncio.sleep(0.01)
        assert (await post(connections)).status == 200
        connections.close()


async def test_an_answer_that_was_given_up_is_not_the_next_ones() -> None:
    async def talk(talker: Talker) -> None:
        while True:
            body = await talker.hear()
            if body == b"slow":
                await talker.reader.read()  # until the client has closed
                return
            await talker.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async with serving(talk) as server:
        connections = Connections(server.url, connect_timeout=10)
        assert (await post(connections, b"first")).body == b"first"
        with pytest.raises(TimeoutError, match="no answer in time"):
            await post(connections, b"slow", seconds=0.05)
        assert (await post(connections, b"second")).body == b"second"
        waiting = asyncio.create_task(post(connections, b"slow"))
        while len(server.talkers[1].heads) < 2:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await post(connections, b"third")).body == b"third"
        assert len(server.talkers) == 3
        connections.close()


@pytest.mark.parametrize("secure", [False, True])
async def test_an_answer_before_the_request_is_whole_ends_the_connection(
    secure: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def talk(talker: Talker) -> None:
        await talker.reader.readuntil(b"\r\n\r\n")
        await talker.say(b"HTTP/1.1 413 Too large\r\nContent-Length: 0\r\n\r\n")
        await talker.reader.readuntil(b"never")

    async with serving(talk, tls=trusted(monkeypatch, tmp_path) if secure else None) as server:
        connections = Connections(server.url, connect_timeout=10)
        assert (await post(connections, bytes(50_000_000))).status == 413
        assert (await post(connections, bytes(50_000_000))).status == 413
        assert len(server.talkers) == 2
        connections.close()


async def test_a_server_that_closes_what_is_idle_is_asked_anew() -> None:
    async with serving(once(OK)) as server:
        connections = Connections(server.url, connect_timeout=10)
        for number in range(1, 4):
            assert (await post(connections)).body == b"ok"
            assert len(server.talkers) == number
            while connections._all:
                await asyncio.sleep(0.01)


async def test_closing_fails_whoever_waits() -> None:
    heard = asyncio.Event()

    async def talk(talker: Talker) -> None:
        await talker.hear()
        heard.set()
        await talker.reader.read()

    async with serving(talk) as server:
        connections = Connections(server.url, connect_timeout=10)
        waiting = asyncio.create_task(post(connections))
        await heard.wait()
        connections.close()
        with pytest.raises(ConnectionError):
            await waiting


async def test_closing_cuts_no_answer_short() -> None:
    """One without a length is whole where the server ends the connection, and nowhere else."""

    async def talk(talker: Talker) -> None:
        await talker.hear()
        await talker.say(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await talker.reader.read()

    async with serving(talk) as server:
        connections = Connections(server.url, connect_timeout=10)
        waiting = asyncio.create_task(post(connections))
        while not any(connection._body for connection in connections._all):
            await asyncio.sleep(0.01)
        connections.close()
        with pytest.raises(ConnectionError):
            await waiting


async def test_closing_while_a_connection_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    real, asked, go = loop.getaddrinfo, asyncio.Event(), asyncio.Event()

    async def lookup(*where: Any, **how: Any) -> Any:
        asked.set()
        await go.wait()
        return await real(*where, **how)

    async with serving(echo) as server:
        monkeypatch.setattr(loop, "getaddrinfo", lookup)
        connections = Connections(server.url, connect_timeout=10)
        waiting = asyncio.create_task(post(connections))
        await asked.wait()
        connections.close()
        go.set()
        with pytest.raises(ConnectionError):
            await waiting
        assert not connections._idle


async def test_nobody_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        port = bound.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"no connection to 127.0.0.1:{port}: Connection refused"):
            await post(Connections(f"http://127.0.0.1:{port}", connect_timeout=10))


async def test_a_host_that_does_not_exist_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0

    async def lookup(host: str, port: int, **how: Any) -> list[Any]:
        nonlocal failures
        failures += 1
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    connections = Connections("http://engine.test", connect_timeout=10)
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"no connection to engine\.test:80: .*not known"):
            await post(connections)
    assert failures == 2


async def test_a_host_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lambda *_, **__: asyncio.sleep(60))
    with pytest.raises(TimeoutError, match=r"no connection to engine\.test:80 in 0\.05 s"):
        await post(Connections("http://engine.test", connect_timeout=0.05))


@pytest.mark.parametrize("value", ["two\r\nlines: x", "two\nlines", "\0"])
async def test_a_header_is_one_line(value: str) -> None:
    with pytest.raises(ValueError, match="a header must be one line"):
        await post(Connections("http://127.0.0.1:1", connect_timeout=10), X=value)
