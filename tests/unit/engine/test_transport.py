"""`Engine` on raw connections: each request gets its own answer, or an error that says why not."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
import trustme
from support.client import INFO, Pauses, client, request
from support.http import completion
from support.loop_clock import skip

from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.errors import EngineError, UsageError, describe

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


SAMPLED = sampled(3)


async def echo(talker: Talker) -> None:
    """Answer each request with an id of its own: the last one of its prompt."""
    while True:
        body = await talker.hear()
        await talker.say(
            ok(sampled(body["input_ids"][-1]) if body and "input_ids" in body else b"{}")
        )


def first(said: bytes) -> Talk:
    """Say it to the first request, then close; later connections answer as they should."""

    async def talk(talker: Talker) -> None:
        if talker.number:
            await echo(talker)
        await talker.hear()
        await talker.say(said)

    return talk


async def asked(calls: Engine, index: int = 3) -> int:
    """The one id that is sampled after a prompt that ends with `index`."""
    [found] = (await calls.generate(request([1, index]))).output_ids.tolist()
    return int(found)


# --- what goes well -----------------------------------------------------------------------------


async def test_only_requests_in_turn_share_a_connection() -> None:
    async with talking(echo) as server, client(server.url) as calls:
        for index in (3, 4, 5):
            assert await asked(calls, index) == index
        assert len(server.talkers) == 1
        for _ in range(2):
            indexes = list(range(10, 150))
            assert await asyncio.gather(*(asked(calls, index) for index in indexes)) == indexes
            assert len(server.talkers) == 140


async def test_what_is_sent() -> None:
    async with talking(echo) as server, client(f"{server.url}/base/generate") as calls:
        await calls.generate(request(session="Zoë"))
        [(line, head, _)] = [heard for heard in server.heard if heard[0].startswith("POST")]
    lines = dict(text.split(": ", 1) for text in head.decode().strip().split("\r\n")[1:])
    assert line == "POST /base/generate HTTP/1.1"
    assert lines.pop("User-Agent").startswith("Python")
    assert int(lines.pop("Content-Length")) > 0
    assert lines == {
        "Host": server.url.removeprefix("http://"),
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "x-smg-routing-key": "Zoë",
    }


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_an_answer_like_any_other(status: int) -> None:
    """Followed, some would turn the POST into a GET, and all would send it twice."""

    async def talk(talker: Talker) -> None:
        while True:
            await talker.hear()
            head = b"HTTP/1.1 %d Go\r\nLocation: /there\r\nContent-Length: 0\r\n\r\n"
            await talker.say(head % status)

    async with talking(talk) as server, client(server.url) as calls:
        for call in (
            lambda: calls.generate(request()),
            lambda: calls.generate(request(), progress=lambda ids: None),
            lambda: calls.post(f"{server.url}/generate", {}),
        ):
            with pytest.raises(EngineError, match=f"HTTP {status}"):
                await call()
    assert {line for line, _, _ in server.heard} == {"POST /generate HTTP/1.1"}
    assert len(server.heard) == 3


async def test_tls_by_system_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server's is of an authority that is the system's only one."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with talking(echo, tls=context) as server:
        async with client(server.url) as calls:
            assert await asked(calls) == 3
            long = request([1] * 300_000 + [4])
            engine = Engine(EngineConfig(engine=server.url), model_info=type(INFO)())
            assert (await engine.generate(long)).output_ids.tolist() == [4]
            assert await asked(calls, 5) == 5
            await engine.aclose()
        assert len(server.talkers) == 2
        monkeypatch.delenv("SSL_CERT_FILE")
        async with client(server.url, retries=0) as calls:
            with pytest.raises(EngineError, match="certificate verify failed"):
                await calls.generate(request())
            assert "certificate verify failed" in (await calls.health()).why


def test_another_event_loop_opens_connections_of_its_own() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    calls = Engine(EngineConfig(engine=f"http://127.0.0.1:{port}"), model_info=INFO)

    async def play(*, last: bool) -> int:
        async with talking(echo, port=port):
            found = await asked(calls)
            if last:
                await calls.aclose()
            return found

    assert [asyncio.run(play(last=last)) for last in (False, True)] == [3, 3]


SECRETS = ("se%20cret", "se cret", "bWU6")


async def test_credentials_are_sent_and_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(talker: Talker) -> None:
        while True:
            body = await talker.hear()
            refusal = b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"
            await talker.say(refusal if body and "input_ids" in body else ok(b"{}"))

    caplog.set_level("DEBUG")
    async with talking(talk) as server:
        url = server.url.replace("://", "://me:se%20cret@")
        async with client(url, model_info=None) as calls:
            shown = [calls.url, repr(calls.config), calls.config.model_dump_json()]
            with pytest.raises(EngineError) as raised:
                await calls.generate(request())
            await calls.abort("r")
            await calls.health()
            await calls.post(f"{calls.url}/generate", {})
    shown += [str(raised.value), repr(describe(raised.value)), caplog.text]
    assert not [text for text in shown for secret in SECRETS if secret in text]
    paths = {line.split()[1] for line, _, _ in server.heard}
    assert paths >= {"/generate", "/abort_request", "/health", "/workers"}
    header = b"\r\nAuthorization: Basic bWU6c2UgY3JldA==\r\n"
    assert all(header in head for _, head, _ in server.heard)


async def test_credentials_go_to_no_other_server() -> None:
    async with talking(echo) as worker:

        async def talk(talker: Talker) -> None:
            await talker.hear()
            await talker.say(ok(orjson.dumps({"workers": [{"url": worker.url}]})))

        url = lambda router: router.url.replace("://", "://me:secret@")
        async with talking(talk) as router, client(url(router)) as calls:
            await calls.abort("r")
    sent = [b"Authorization" in head for _, head, _ in (*router.heard, *worker.heard)]
    assert sent == [True, False]


@pytest.mark.parametrize("url", ["ftp://me:secret@host", "http://", f"http://{'a' * 70}.test:1"])
def test_a_bad_address_is_refused_without_its_credentials(url: str) -> None:
    with pytest.raises(UsageError, match="the engine's address") as raised:
        EngineConfig(engine=url)
    assert "secret" not in str(raised.value)


# --- what goes wrong ----------------------------------------------------------------------------


BROKEN = {
    "nothing": b"",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "long header": b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n",
    "bad gzip": ok(b"no gzip", "Content-Encoding: gzip"),
    "stray": ok(SAMPLED) + b"stray",
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_answer_is_aborted_and_asked_for_again(answer: bytes, stream: bool) -> None:
    """Nothing is sent twice: the next attempt is a request of its own."""
    async with talking(first(answer)) as server, client(server.url) as calls:
        progress = (lambda ids: None) if stream else None
        completion = await calls.generate(request(), progress=progress)
    rids = server.rids("/generate")
    assert (completion.output_ids.tolist(), completion.attempts) == ([7], 2)
    assert len(rids) == 2 == len(set(rids))
    assert server.rids("/abort_request") == rids[:1]


async def test_a_connection_with_two_answers_carries_no_other_request() -> None:
    async def talk(talker: Talker) -> None:
        await talker.hear_post()
        await talker.say(ok(SAMPLED) + ok(sampled(666)))
        await talker.hear_post()
        await talker.say(ok(sampled(666)))

    async with talking(talk) as server, client(server.url) as calls:
        assert [await asked(calls) for _ in range(3)] == [3] * 3
        assert [talker.posts for talker in server.talkers if talker.posts] == [1] * 3


async def test_an_unsolicited_response_is_discarded() -> None:
    """An answer on an idle connection is not the next request's."""
    go = asyncio.Event()

    async def talk(talker: Talker) -> None:
        await talker.hear()
        await talker.say(ok(SAMPLED))
        if not talker.number:
            await go.wait()
            await talker.say(ok(sampled(666)))
            await talker.gone()

    async with talking(talk) as server, client(server.url) as calls:
        assert await asked(calls) == 3
        go.set()
        async with client(server.url) as other:  # what was said before has arrived when this has
            assert await asked(other) == 3
        completion = await calls.generate(request())
    assert (completion.output_ids.tolist(), completion.attempts) == ([3], 2)


async def test_an_answer_that_was_given_up_is_not_the_next_ones() -> None:
    async def talk(talker: Talker) -> None:
        while True:
            body = await talker.hear()
            if "input_ids" in body and body["input_ids"][-1] == 9:
                await talker.gone()
                return
            await talker.say(ok(sampled(body.get("input_ids", [0])[-1])))

    async with talking(talk) as server, client(server.url, retries=0, attempt_timeout=600) as calls:
        assert await asked(calls, 4) == 4
        late, given_up = (asyncio.create_task(asked(calls, 9)) for _ in range(2))
        await server.until(lambda found: len(found.rids("/generate")) == 3)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        skip(601)
        with pytest.raises(EngineError, match="no answer in time"):
            await late
        assert await asked(calls, 5) == 5
    slow = server.rids("/generate")[1:3]
    assert sorted(server.rids("/abort_request")) == sorted(slow)


async def test_closing_ends_the_attempts() -> None:
    async def talk(talker: Talker) -> None:
        await talker.hear()
        await talker.say(b"HTTP/1.1 200 OK\r\n\r\n" + SAMPLED[:9])
        await talker.gone()

    pauses = Pauses()
    async with talking(talk) as server, client(server.url, sleep=pauses) as calls:
        waiting = asyncio.create_task(calls.generate(request()))
        await server.until(lambda found: len(found.heard) == 1)
        await calls.aclose()
        with pytest.raises(EngineError, match="closed during the request"):
            await waiting
    assert (pauses, len(server.heard)) == ([], 1)


async def test_an_engine_that_does_not_listen_is_an_error() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        port = bound.getsockname()[1]
        words = f"no connection to 127.0.0.1:{port}: Connection refused"
        async with client(f"http://127.0.0.1:{port}", retries=0) as calls:
            with pytest.raises(EngineError, match=words):
                await calls.generate(request())
            assert (await calls.health()).down


async def test_a_host_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, looking = asyncio.get_running_loop(), asyncio.Event()

    async def lookup(host: str, port: int, **how: Any) -> list[Any]:
        looking.set()
        return await asyncio.Event().wait()  # type: ignore[return-value]

    monkeypatch.setattr(loop, "getaddrinfo", lookup)
    async with client("http://engine.test", retries=0, connect_timeout=600) as calls:
        waiting = asyncio.create_task(calls.generate(request()))
        await looking.wait()
        skip(601)
        with pytest.raises(EngineError, match="no connection in time"):
            await waiting
