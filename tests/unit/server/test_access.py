"""Who may ask the endpoint, and what a hostile request gets: a refusal with its reason, never a
500.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.endpoints import Bench, endpoint
from support.loop_clock import skip_until
from support.memory import peak
from yarl import URL

from toolroll.endpoint import EndpointSettings
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.requests import received
from toolroll.endpoint.requests.received import decode
from toolroll.testing import Fault, Reply, fault_at

USER: Any = {"role": "user", "content": "Hi"}
BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'
CHAT = "/sessions/s/v1/chat/completions"
KEY = "a-secret-key"
JSON = {"Content-Type": "application/json"}


async def send(
    bench: Bench, data: bytes = BODY, *, path: str = CHAT, method: str = "POST", **headers: str
) -> tuple[int, str | None]:
    """The status and the error's code of one request; `Content_Type` stands for `Content-Type`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with bench.http.request(
        method, URL(bench.url + path, encoded=True), data=data, headers=named
    ) as response:
        answer = await response.json()
        return response.status, answer.get("error", {}).get("code")


# --- a web page -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://127.0.0.1.evil.example",
        "null",
        "http://127.0.0.1:1",
        "https://127.0.0.1:{port}",
    ],
)
async def test_without_a_key_a_foreign_page_changes_nothing(tokenizer: Any, origin: str) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        origin = origin.replace("{port}", str(URL(bench.url).port))
        for path in ("/sessions", "/sessions/s/reward", CHAT):
            assert await send(bench, path=path, Origin=origin, **JSON) == (403, "forbidden_origin")  # type: ignore[arg-type]
        assert await send(bench, path="/sessions/s", method="DELETE", Origin=origin) == (
            403,
            "forbidden_origin",
        )
        assert await send(bench, path=CHAT, method="OPTIONS", Origin=origin) == (
            403,
            "forbidden_origin",
        )
        assert len(bench.endpoint.sessions) == 0
        assert bench.engine.log == []


async def test_its_own_page_and_a_program_may_ask(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        port = URL(bench.url).port
        assert await send(bench, Origin=bench.url, **JSON) == (200, None)  # type: ignore[arg-type]
        assert await send(bench, **JSON) == (200, None)  # type: ignore[arg-type]
        for host in (
            f"localhost:{port}",
            "LOCALHOST",
            f"127.0.0.1:{port}",
            f"[::1]:{port}",
            "[::1]",
        ):
            assert await send(bench, Host=host, **JSON) == (200, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8400",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "[",
        "",
    ],
)
async def test_a_rebound_name_reads_nothing(tokenizer: Any, host: str) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        await send(bench, **JSON)  # type: ignore[arg-type]
        for path in ("/health", "/v1/models", "/sessions/s/trace", "/sessions/s/trajectories"):
            assert await send(bench, b"", path=path, method="GET", Host=host) == (
                403,
                "forbidden_host",
            )
        assert await send(bench, Host=host, Origin=f"http://{host}", **JSON) == (  # type: ignore[arg-type]
            403,
            "forbidden_host",
        )


async def test_with_a_key_neither_the_host_nor_the_origin_counts(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.", settings={"api_key": KEY}) as bench:
        page = {"Host": "gpu-7:8400", "Origin": "https://my.app", **JSON}
        assert await send(bench, **page, Authorization=f"Bearer {KEY}") == (200, None)  # type: ignore[arg-type]
        assert await send(bench, **page) == (401, "invalid_api_key")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None],
)
async def test_a_body_is_json_by_its_header(tokenizer: Any, kind: str | None) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        headers = {"Content-Type": kind} if kind else {}
        for path in ("/sessions", CHAT, "/v1/completions", "/tokenize"):
            async with bench.http.post(
                bench.url + path, data=BODY, headers=headers, skip_auto_headers=["Content-Type"]
            ) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (
                    415,
                    "unsupported_media_type",
                )
        assert len(bench.endpoint.sessions) == 0
        assert await send(bench, **{"Content-Type": "application/json; charset=utf-8"}) == (  # type: ignore[arg-type]
            200,
            None,
        )
        async with bench.http.post(f"{bench.url}/sessions") as response:
            assert response.status == 201  # no body, no type


# --- hostile bytes --------------------------------------------------------------------------------


async def raw(bench: Bench, head: bytes, body: bytes = b"") -> bytes:
    """The status line's number of what the endpoint answers to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(bench.url).port)
    writer.write(head.replace(b"\n", b"\r\n") + b"\r\n\r\n" + body)
    line = await reader.readline()
    writer.close()
    return line.split(b" ")[1] if line else b"closed"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/models HTTP/1.1\nHost: 127.0.0.1\nAuthorization: Bearer \xff", b"401"),
        (b"GET /v1/models HTTP/1.1\nHost: 127.0.0.1\nAuthorization: \xff\xfe", b"401"),
        (b"GET /v1/models HTTP/1.1\nHost: 127.0.0.1\nx-session-id: \xff", b"400"),
        (b"GET /sessions/%ff/trace HTTP/1.1\nHost: 127.0.0.1", b"400"),
        (b"GET /sessions/%ed%a0%80/trace HTTP/1.1\nHost: 127.0.0.1", b"400"),
        (b"GET /sessions/\xff/trace HTTP/1.1\nHost: 127.0.0.1", b"400"),
    ],
)
async def test_no_header_and_no_path_is_an_internal_error(
    tokenizer: Any, head: bytes, status: bytes
) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.", settings={"api_key": KEY}) as bench:
        assert await raw(bench, head) == status


@pytest.mark.parametrize(
    "head",
    [
        b"POST /sessions/s/chat/completions\xff HTTP/1.1\nHost: 127.0.0.1\nContent-Length: 0",
        b"POST /\xff/chat/completions HTTP/1.1\nHost: 127.0.0.1\nContent-Length: 0",
        b"GET /%ff/chat/completions HTTP/1.1\nHost: 127.0.0.1",
        b"GET /health HTTP/1.1\nHost: \xff",
        b"GET /health HTTP/1.1\nHost: 127.0.0.1\nOrigin: \xff",
        b"GET /health HTTP/1.0",
        b"GET /v1/models/\xff HTTP/1.1\nHost: 127.0.0.1",
        b"POST /sessions HTTP/1.1\nHost: 127.0.0.1\nContent-Type: a/\xff\nContent-Length: 2",
        b"POST /sessions HTTP/1.1\nHost: 127.0.0.1\nContent-Type: "
        b"application/json\nContent-Encoding: \xff\nContent-Length: 2",
    ],
)
async def test_without_a_key_neither(tokenizer: Any, head: bytes) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status = await raw(bench, head, b"{}")
        assert status[:1] == b"4", status


@pytest.mark.parametrize(
    ("encoding", "data", "status", "code"),
    [
        ("gzip", BODY, 400, "invalid_body"),
        ("gzip", gzip.compress(BODY)[:-9], 400, "invalid_body"),
        ("gzip", gzip.compress(BODY) + b"more", 400, "invalid_body"),
        ("deflate", b"\xff" * 20, 400, "invalid_body"),
        ("gzip", gzip.compress(b"no JSON"), 400, "invalid_json"),
        ("zip", BODY, 415, "unsupported_media_type"),
        ("gzip", gzip.compress(BODY), 200, None),
        ("deflate", zlib.compress(BODY), 200, None),
        ("identity", BODY, 200, None),
    ],
    ids=[
        "not gzip",
        "cut gzip",
        "gzip and more",
        "not deflate",
        "gzip without JSON",
        "unknown",
        "gzip",
        "deflate",
        "identity",
    ],  # the data holds the time: each worker would name its tests otherwise
)
async def test_a_body_is_what_its_encoding_says(
    tokenizer: Any, encoding: str, data: bytes, status: int, code: str | None
) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        assert await send(bench, data, Content_Encoding=encoding, **JSON) == (status, code)


def test_no_more_is_decompressed_than_the_limit() -> None:
    bomb = gzip.compress(b'{"a": "' + b" " * 20_000_000 + b'"}', compresslevel=1)
    settings = EndpointSettings(max_body=10_000)
    tracemalloc.start()
    with pytest.raises(ApiError) as refused:
        decode(bomb, compressed=True, settings=settings)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")
    assert peak < 1_000_000


MANY = 200_000


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("unit", ["1", "[]", '""', '"a,b"', '{"a": 1}', '"k%d": 1'])
def test_no_object_is_built_from_a_body_with_too_many_items(unit: str, compressed: bool) -> None:
    items = ",".join(unit % i if "%" in unit else unit for i in range(MANY))
    raw = ('{"a": ' + (f"{{{items}}}" if "%" in unit else f"[{items}]") + "}").encode()
    body = gzip.compress(raw) if compressed else raw

    def refused() -> None:
        with pytest.raises(ApiError) as error:
            decode(body, compressed=compressed, settings=EndpointSettings(max_items=MANY // 2))
        assert (error.value.status, error.value.code) == (413, "too_many_items")

    assert peak(refused) < 4 * len(raw) + 10**6  # the decompressed text and its buffers


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


@pytest.mark.parametrize("unit", ["1", "[]", '""', '{"a": 1}', '{"": [""]}', '{"a": {"b": [{}]}}'])
def test_looking_for_long_texts_takes_no_memory(unit: str) -> None:
    body: Any = {"messages": [[json.loads(unit) for _ in range(10_000)], "x" * 1000]}
    assert peak(lambda: received._long_text(body, 1000)) < 20_000
    body["messages"] += ["y" * 1001, "z" * 1001]
    assert received._long_text(body, 1000) == ".messages[2]"


# --- half-sent requests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le",
        b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
        b"application/json\r\nContent-Length: 100\r\n\r\n{",
        b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
        b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
    ids=["nothing", "half a header", "half a body", "half a chunk"],
)
async def test_what_is_half_sent_is_closed(tokenizer: Any, part: bytes) -> None:
    has_head = b"\r\n\r\n" in part
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
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


# --- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers", [range(1, 11), range(10, 0, -1), [3] * 10, [7, 2, 2, 9, 1, 7, 3, 8, 1, 5]]
)
async def test_racing_retries_of_one_request_are_one_answer(tokenizer: Any, numbers: Any) -> None:
    gate = asyncio.Event()
    async with endpoint(
        tokenizer, lambda request: Reply(f"Reply {request.index}.", hold=gate, hold_after=1)
    ) as bench:
        asking = [
            asyncio.create_task(
                bench.post(CHAT, {"messages": [USER]}, **{"x-stainless-retry-count": str(number)})
            )
            for number in numbers
        ]
        await bench.engine.until(lambda engine: engine.held >= 1)
        while sum(work.waiting for work in bench.endpoint.sessions.find("s").pending.all()) < len(
            asking
        ):
            await asyncio.sleep(0)
        gate.set()
        answers = await asyncio.gather(*asking)
        late = await bench.post(CHAT, {"messages": [USER]}, **{"x-stainless-retry-count": "1"})
        assert len({answer["id"] for _, answer in [*answers, late]}) == 1
        assert len(bench.engine.log) == 1
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 1


async def test_a_retry_after_an_error_does_not_take_the_answer_of_an_equal_request(
    tokenizer: Any,
) -> None:
    """Samples of one prompt in one session have equal bodies: one answer had two receivers."""
    faults = fault_at({0: Fault(abort_after=1)})
    async with endpoint(
        tokenizer, lambda request: f"Reply {request.index}.", faults=faults
    ) as bench:
        body = {"messages": [USER]}
        status, _ = await bench.post(CHAT, body)
        assert status == 503
        _, equal = await bench.post(CHAT, body)
        _, again = await bench.post(CHAT, body, **{"x-stainless-retry-count": "1"})
        assert equal["id"] != again["id"]
        _, lost = await bench.post(CHAT, body, **{"x-stainless-retry-count": "1"})
        assert lost["id"] in (equal["id"], again["id"]), "only one retry follows the error"
        assert len(await bench.trajectories(refused=1)) == 2


async def test_a_retry_after_a_refusal_does_not_take_the_answer_of_an_equal_request(
    tokenizer: Any,
) -> None:
    gate = asyncio.Event()
    async with endpoint(
        tokenizer,
        lambda request: Reply(f"Reply {request.index}.", hold=gate, hold_after=1),
        settings={"max_in_flight": 1},
    ) as bench:
        body = {"messages": [USER]}
        asking = asyncio.create_task(bench.post(CHAT, body))
        await bench.engine.until(lambda engine: engine.held == 1)
        status, _ = await bench.post(CHAT, body)
        assert status == 429
        gate.set()
        _, equal = await asking
        _, again = await bench.post(CHAT, body, **{"x-stainless-retry-count": "1"})
        assert equal["id"] != again["id"]
