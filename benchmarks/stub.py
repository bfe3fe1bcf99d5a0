"""A stub of the engine in a separate process: it answers `/generate` at once, or after a latency,
with prepared replies.

It parses only the length of a request, to use little CPU. Run as `python -m benchmarks.stub PORT
LATENCY`, with the replies as JSON lines on standard input.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import selectors
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.processes import free_ports

from benchmarks.clock import HELPERS

STEP = 0.004
"""Seconds between polls of a stub with a latency. Answers are late by at most twice this."""
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_ABORTED = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

_COUNT = b"77777777"
"""Placeholder for the number of prompt tokens in a reply, padded with spaces."""
_ID = b"0" * 32
"""Placeholder for the id of the request in a reply."""
_RID = b'"rid":"'


def _prompt_tokens(body: bytes) -> int:
    begin = body.find(b'"input_ids"')
    if begin < 0:
        return 1
    ids = np.frombuffer(body, dtype=np.uint8)[begin : body.find(b"]", begin)]
    return int(np.count_nonzero(ids == ord(","))) + 1  # a quarter of what bytes.count takes


class _Connection(asyncio.BufferedProtocol):
    """One keep-alive connection."""

    _room = memoryview(bytearray(1 << 20))
    """The receive buffer of all connections: each piece is consumed before the next one is read."""

    def __init__(self, replies: Iterator[tuple[bytes, bytes]], latency: float) -> None:
        self._replies = replies
        self._latency = latency
        self._begun = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        data = self._begun + self._room[:nbytes]
        end = data.find(b"\r\n\r\n")
        head = data[: max(end, 0)].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n")[0]) if at >= 0 else 0
        if end < 0 or len(data) < end + 4 + length:
            self._begun = data
            return
        self._begun = b""
        self._answer(head, data[end + 4 :])

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if not head.startswith(b"post /generate"):
            aborted = head.startswith(b"post /abort_request")
            self._transport.write(_ABORTED if aborted else _NOT_FOUND)
            return
        plain, with_logprobs = next(self._replies)
        wanted = b'"return_logprob":true' in body or b'"return_logprob": true' in body
        reply = (with_logprobs if wanted else plain).replace(_COUNT, b"%8d" % _prompt_tokens(body))
        at = body.find(_RID)
        if at >= 0:
            reply = reply.replace(_ID, body[at + len(_RID) : at + len(_RID) + len(_ID)])
        if self._latency:
            asyncio.get_running_loop().call_later(self._latency, self._write, reply)
        else:
            self._write(reply)

    def _write(self, reply: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(reply)


class _Steps(selectors.DefaultSelector):
    """A selector that polls at intervals, like an engine that answers in steps. Waking for every
    request and answer would take twice the CPU, and evict the caches of other processes.
    """

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            time.sleep(STEP)
            timeout = None if timeout is None else max(0.0, timeout - STEP)
        return super().select(timeout)


async def _serve(port: int, latency: float, replies: Sequence[tuple[bytes, bytes]]) -> None:
    turn = itertools.cycle(replies)
    server = await asyncio.get_running_loop().create_server(
        lambda: _Connection(turn, latency), "127.0.0.1", port, backlog=4096
    )
    parent = os.getppid()
    # until the benchmark ends, even if it was killed
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(1)
    server.close()


def _response(body: dict[str, Any]) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(data)
        + data
    )


def answer(text: str, ids: Sequence[int], *, logprobs: bool) -> dict[str, Any]:
    """Return an answer of SGLang with `text`."""
    meta: dict[str, Any] = {
        "id": _ID.decode(),
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": int(_COUNT),
        "completion_tokens": len(ids),
        "cached_tokens": 100,
        "e2e_latency": 0.5,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
    }
    if logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [-0.125 - (at % 7) / 3, index, None] for at, index in enumerate(ids)
        ]
    return {"text": text, "output_ids": list(ids), "meta_info": meta}


@contextmanager
def stub(replies: Iterable[tuple[str, Sequence[int]]], *, latency: float = 0.0) -> Iterator[str]:
    """Yield the address of a stub that returns `replies` (text and ids) in turn."""
    port = free_ports(1)[0]
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks.stub", str(port), str(latency)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=root)
    try:
        HELPERS.add(process.pid)
        assert process.stdin is not None
        process.stdin.write("\n".join(json.dumps([text, list(ids)]) for text, ids in replies))
        process.stdin.close()
        _wait(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait(port: int) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the stub does not come up")


if __name__ == "__main__":
    given = [json.loads(line) for line in sys.stdin]
    made = [
        tuple(_response(answer(text, ids, logprobs=wanted)) for wanted in (False, True))
        for text, ids in given
    ]
    latency = float(sys.argv[2])
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(_Steps() if latency else None)
    ) as runner:
        runner.run(_serve(int(sys.argv[1]), latency, made))  # type: ignore[arg-type]
