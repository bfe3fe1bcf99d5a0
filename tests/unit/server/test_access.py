"""Who may use the endpoint, and what a hostile request gets: a refusal with its reason, never a
500.
"""

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AuthenticationError
from support.loop_clock import skip_until
from support.memory import peak
from support.recorded import finished
from support.served import CHAT, JSON, TEXT, USER, ServedBench, in_session, serve
from yarl import URL

from toolroll.endpoint import EndpointSettings
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.http.access import session_key
from toolroll.endpoint.requests import received
from toolroll.endpoint.requests.received import decode
from toolroll.rollout.errors import UsageError

BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'
PATH = in_session(CHAT)
KEY = "a-secret-key"
KEYED: dict[str, Any] = {"settings": {"api_key": KEY}}


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **headers}


async def send(
    bench: ServedBench,
    data: bytes = BODY,
    headers: Mapping[str, str] = JSON,
    *,
    path: str = PATH,
    method: str = "POST",
) -> tuple[int, str | None]:
    """Return the status and the code of the error."""
    url = URL(bench.url + path, encoded=True)
    skipped = ["Content-Type"]  # the client's own
    async with bench.http.request(
        method, url, data=data, headers=headers, skip_auto_headers=skipped
    ) as response:
        answer = await response.text()
        error = json.loads(answer).get("error", {}) if answer.startswith("{") else {}
        return response.status, error.get("code")


def test_another_address_than_loopback_needs_a_key() -> None:
    for host in ("0.0.0.0", "192.168.0.1", "::"):
        with pytest.raises(UsageError, match="api_key"):
            EndpointSettings(host=host)
        EndpointSettings(host=host, api_key=KEY)
    with pytest.raises(UsageError):
        EndpointSettings(api_key="short")


async def test_a_key_opens_everything_a_sessions_key_its_session() -> None:
    own, other = session_key(KEY, "s"), session_key(KEY, "other")
    async with serve(**KEYED) as bench:
        for key in ("unused", KEY + "x", KEY[:-1], other):
            with pytest.raises(AuthenticationError) as caught:
                await bench.client("s", api_key=key).models.list()
            assert caught.value.code == "invalid_api_key"
        created = await bench.send("/sessions", {"session_id": "s"}, **bearer(KEY))
        assert created["api_key"] == own
        asked, named = {"messages": [USER]}, {"messages": [USER], "session_id": "other"}
        rewards, header = {"reward": 1}, {"x-session-id": "s"}
        rows: list[tuple[str, Any, dict[str, str], int]] = [
            (PATH, asked, bearer(own), 200),
            (PATH, asked, bearer(KEY), 200),
            ("/sessions/s/reward", rewards, bearer(own), 200),
            ("/sessions/other/reward", rewards, bearer(own), 401),
            ("/sessions", {"session_id": "other"}, bearer(own), 401),
            (CHAT, named, bearer(own), 401),
            (PATH, named, bearer(own), 400),
            (CHAT, named, bearer(own, **header), 400),
        ]
        for path, body, headers, expected in rows:
            assert (await bench.post(path, body, **headers))[0] == expected, (path, body)
        assert (await bench.get("/health"))["status"] == "ok"
        assert len(bench.engine.log) == 2


WHOLE_SERVER = (("GET", "/sessions"), ("GET", "/metrics"))
EXPORT = ("POST", "/sessions/s/export")


async def test_the_routes_of_the_whole_server_need_its_key(tmp_path: Path) -> None:
    """A session's key exports that session."""
    own, other = (bearer(session_key(KEY, name)) for name in ("s", "other"))
    async with serve(**KEYED, out=tmp_path) as bench:
        for name in ("s", "other", "t"):
            await bench.send(in_session(CHAT, name), {"messages": [USER]}, **bearer(KEY))
        for method, path in (*WHOLE_SERVER, EXPORT):
            for headers in ({}, bearer("wrong"), other):
                status, _ = await send(bench, b"", headers, method=method, path=path)
                assert status == 401, (path, headers)
        for method, path in WHOLE_SERVER:
            named = {**other, "x-session-id": "other"}  # it opens no others
            assert (await send(bench, b"", named, method=method, path=path))[0] == 401
            assert (await send(bench, b"", bearer(KEY), method=method, path=path))[0] == 200
        assert finished(tmp_path) == []
        for headers, path in ((own, EXPORT[1]), (bearer(KEY), "/sessions/t/export")):
            assert (await send(bench, b"", headers, path=path))[0] == 200
    assert finished(tmp_path) == ["s", "t"]


ORIGINS = ("https://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:{port}")
REBOUND = ("evil.example:8400", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "[", "")


async def test_without_a_key_a_foreign_page_gets_nothing(tmp_path: Path) -> None:
    async with serve(out=tmp_path) as bench:
        await bench.ask(USER)
        before = await bench.get("/sessions")
        origins = [origin.format(port=URL(bench.url).port) for origin in ORIGINS]
        pages = [
            *(({"Origin": origin}, "forbidden_origin") for origin in origins),
            *(({"Host": host}, "forbidden_host") for host in REBOUND),
            *(({"Host": host, "Origin": f"http://{host}"}, "forbidden_host") for host in REBOUND),
        ]
        routes = [(route.method, route.path) for route in bench.server._routes()]
        for page, code in pages:
            for method, path in (*routes, ("OPTIONS", PATH)):
                path = re.sub(r"{\w+}", "s", path)
                answer = await send(bench, headers={**JSON, **page}, method=method, path=path)
                assert answer == (403, code), (page, path)
        assert await bench.get("/sessions") == before
        assert len(bench.engine.log) == 1
        assert finished(tmp_path) == []


async def test_its_own_page_and_a_program_may_ask() -> None:
    """With a key, neither the host nor the origin counts."""
    async with serve() as bench:
        port = URL(bench.url).port
        hosts = (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", f"[::1]:{port}", "[::1]")
        for headers in ({}, {"Origin": bench.url}, *({"Host": host} for host in hosts)):
            assert await send(bench, headers={**JSON, **headers}) == (200, None)
    async with serve(**KEYED) as bench:
        page = {"Host": "gpu-7:8400", "Origin": "https://my.app", **JSON}
        assert await send(bench, headers={**page, **bearer(KEY)}) == (200, None)
        assert await send(bench, headers=page) == (401, "invalid_api_key")


ENCODED = (
    ("gzip", BODY, 400, "invalid_body"),
    ("gzip", gzip.compress(BODY)[:-9], 400, "invalid_body"),
    ("gzip", gzip.compress(BODY) + b"more", 400, "invalid_body"),
    ("deflate", b"\xff" * 20, 400, "invalid_body"),
    ("gzip", gzip.compress(b"no JSON"), 400, "invalid_json"),
    ("zip", BODY, 415, "unsupported_media_type"),
    ("gzip", gzip.compress(BODY), 200, None),
    ("deflate", zlib.compress(BODY), 200, None),
    ("identity", BODY, 200, None),
)


async def test_a_body_is_what_its_headers_say() -> None:
    async with serve() as bench:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            headers = {"Content-Type": kind} if kind else {}
            for path in ("/sessions", PATH, TEXT, "/tokenize"):
                refused = (415, "unsupported_media_type")
                assert await send(bench, headers=headers, path=path) == refused
        assert len(bench.endpoint.sessions) == 0
        headers = {"Content-Type": "application/json; charset=utf-8"}
        assert await send(bench, headers=headers) == (200, None)
        assert await send(bench, b"", {}, path="/sessions") == (201, None)  # no body, no type
        for encoding, data, *expected in ENCODED:
            answer = await send(bench, data, {**JSON, "Content-Encoding": encoding})
            assert [*answer] == expected, (encoding, data)


async def test_an_id_is_checked_before_it_is_used() -> None:
    bad = "..", "a/b", "a%2Fb", "%2e%2e", "a b", "a\u00e9", "-a", "a" * 129, "a\r\nx-evil: 1", "{}"
    async with serve() as bench:
        for name in bad:
            refusal = await bench.refusal(CHAT, {"messages": [USER], "session_id": name})
            assert refusal[:2] == (400, "invalid_session_id")
            if "." not in name and "%2e" not in name:  # an HTTP client resolves those itself
                url = URL(bench.url + in_session(CHAT, name.strip()))
                async with bench.http.post(url, json={"messages": [USER]}) as response:
                    assert response.status in (400, 404, 405)
        assert bench.engine.log == []
        assert len(bench.endpoint.sessions) == 0


HOST = b" HTTP/1.1\nHost: 127.0.0.1"
WITH_KEY = {
    b"GET /v1/models" + HOST + b"\nAuthorization: Bearer \xff": b"401",
    b"GET /v1/models" + HOST + b"\nx-session-id: \xff": b"400",
    b"GET /sessions/%ed%a0%80/trace" + HOST: b"400",
    b"GET /sessions/\xff/trace" + HOST: b"400",
}
WITHOUT_KEY = (
    b"POST /sessions/s/chat/completions\xff" + HOST + b"\nContent-Length: 0",
    b"GET /health HTTP/1.1\nHost: \xff",
    b"GET /health" + HOST + b"\nOrigin: \xff",
    b"GET /health HTTP/1.0",
    b"GET /v1/models/\xff" + HOST,
    b"POST /sessions" + HOST + b"\nContent-Type: a/\xff\nContent-Length: 2",
    b"POST /sessions"
    + HOST
    + b"\nContent-Type: application/json\nContent-Encoding: \xff\nContent-Length: 2",
)


async def raw(bench: ServedBench, head: bytes, body: bytes = b"") -> bytes:
    """Return the number in the status line of the answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(bench.url).port)
    writer.write(head.replace(b"\n", b"\r\n") + b"\r\n\r\n" + body)
    line = await reader.readline()
    writer.close()
    return line.split(b" ")[1] if line else b"closed"


async def test_no_header_and_no_path_is_an_internal_error() -> None:
    async with serve(**KEYED) as bench:
        assert {head: await raw(bench, head) for head in WITH_KEY} == WITH_KEY
    async with serve() as bench:
        for head in WITHOUT_KEY:
            assert (await raw(bench, head, b"{}"))[:1] == b"4", head


def cost_of_refusing(body: bytes, code: str, *, compressed: bool, **limits: Any) -> int:
    """Return the bytes that it takes to refuse `body`."""

    def refused() -> None:
        with pytest.raises(ApiError) as error:
            decode(body, compressed=compressed, settings=EndpointSettings(**limits))
        assert (error.value.status, error.value.code) == (413, code)

    return peak(refused)


MANY = 200_000


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("unit", ["1", "[]", '""', '"a,b"', '{"a": 1}', '"k%d": 1'])
def test_no_object_is_built_from_a_body_with_too_many_items(unit: str, compressed: bool) -> None:
    items = ",".join(unit % i if "%" in unit else unit for i in range(MANY))
    raw = ('{"a": ' + (f"{{{items}}}" if "%" in unit else f"[{items}]") + "}").encode()
    body = gzip.compress(raw) if compressed else raw
    cost = cost_of_refusing(body, "too_many_items", compressed=compressed, max_items=MANY // 2)
    assert cost < 4 * len(raw) + 10**6  # the decompressed text and its buffers


def test_no_more_is_decompressed_than_the_limit() -> None:
    bomb = gzip.compress(b'{"a": "' + b" " * 20_000_000 + b'"}', compresslevel=1)
    assert cost_of_refusing(bomb, "body_too_large", compressed=True, max_body=10_000) < 1_000_000


@pytest.mark.parametrize("end", ["", "\\"])
def test_a_text_that_is_not_closed_is_read_once(end: str) -> None:
    limit = 1000
    text = b"{" + b"," * limit + b'"' + b'\\"' * 200_000 + end.encode()
    items = received._ITEM.finditer(text)
    assert [len(item.group()) for item in items] == [1, 400_001 + len(end)]
    assert not received.has_more_items(text, limit)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(data=JSON_VALUES)
def test_the_items_of_a_body_are_its_names_and_values(data: Any) -> None:
    def items(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(1 + items(inner) for inner in value.values())
        return 1 + sum(map(items, value)) if isinstance(value, list) else 1

    text, count = json.dumps(data, indent=1).encode(), items(data)
    assert not received.has_more_items(text, count)
    assert received.has_more_items(text, count - 1)


CREATE = b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
HALF_SENT = {
    "half a header": CREATE + b"Le",
    "half a chunk": CREATE + b"Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
}


@pytest.mark.parametrize("part", HALF_SENT.values(), ids=HALF_SENT)
async def test_what_is_half_sent_is_closed(part: bytes) -> None:
    has_head = b"\r\n\r\n" in part
    async with serve() as bench:
        found = []
        for _ in range(60):
            found.append(await asyncio.open_connection("127.0.0.1", URL(bench.url).port))
            found[-1][1].write(part)
        accepted: Any = bench.server._runner and bench.server._runner.server
        while len(found) > sum(
            not has_head or connection._current_request is not None
            for connection in accepted.connections
        ):
            await asyncio.sleep(0)
        ends = asyncio.gather(*(reader.read() for reader, _ in found))  # which the endpoint makes
        answers = await skip_until(ends, seconds=bench.endpoint.settings.receive / 10)
        if has_head:
            assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        else:
            assert answers == [b""] * len(found)
        for _, writer in found:
            writer.close()
