"""Classify every failure of the engine or its router.

SGLang 0.5.23 has four forms of error bodies, and its routers have two more. So failures are
classified by their HTTP status. The body is only used to recognize three cases: a prompt that is
too long, a router's broken connection to a worker, and a router without workers. A failure is
retried only if another attempt may succeed.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson

from toolroll.rollout.errors import capped

_MESSAGE = 1500
_READ = 1 << 20
"""The number of bytes of an error's body that are read."""
NO_ANSWER = "no answer from the engine: "
_ADDRESS = re.compile(r"no connection to \S+: | for https?://\S+")
_NO_WORKERS = "no_available_workers"
"""A router's answer contains this text if all its workers are down."""
_UPSTREAM = re.compile("call_upstream_(request_error|connection_failed)")
"""A router's answer contains this text if the connection to the worker broke. A retry may reach a
different worker.
"""
_RETRYABLE = frozenset({408, 425, 429, 502, 503, 504})
_OVERFLOW = re.compile(
    r"longer than the model's context length|exceeds the model's maximum context length|exceeds "
    r"the maximum allowed length"
)
"""SGLang's messages for a prompt that is too long, or whose answer does not fit."""
_SIZES = re.compile(r"\((\d+) tokens\).*?\((\d+) tokens\)", re.DOTALL)
"""The number of tokens of a prompt, and the limit that it reaches or exceeds."""
_TOTAL = re.compile(
    r"length of (\d+) tokens.*?(\d+) tokens from the input.*?(\d+) tokens for the completion",
    re.DOTALL,
)
"""The context length, and the numbers of tokens of a prompt and of the answer that it leaves no
room for.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt.

    `status`: the HTTP status, or None if no answer came. `retry`: another attempt may succeed.
    `server_fault`: the engine answered 500. This is retried only once, because it recurs if the
    request itself is the cause. `overflow`: if the prompt is too long, the number of its tokens and
    the largest number that leaves room for the answer. Both are None if the engine does not report
    them. `retry_after`: how many seconds the server asks to
    wait. `lost`: there was no connection, or it broke, so the engine may be down. `down`: a router
    reports that its workers are down. `running`: the engine may still be working on the request, so
    the request must be aborted.
    """

    message: str
    status: int | None
    body: str = ""
    retry: bool = False
    server_fault: bool = False
    overflow: tuple[int | None, int | None] | None = None
    retry_after: float | None = None
    lost: bool = False
    down: bool = False
    running: bool = False

    def final(self) -> Failure:
        """Return this failure, after which there is no other attempt."""
        return replace(self, retry=False, server_fault=False, lost=False, down=False)


def from_response(status: int, body: bytes, *, retry_after: str | None = None) -> Failure:
    """Return the failure for an HTTP answer whose status is not 200."""
    text = body[:_READ].decode("utf-8", "replace")
    message = message_of(text)
    upstream = status == 500 and _UPSTREAM.search(text) is not None
    return Failure(
        message=capped(message, _MESSAGE) or f"HTTP {status}",
        status=status,
        body=capped(text),
        retry=status in _RETRYABLE or upstream,
        server_fault=status == 500 and not upstream,
        overflow=_overflow(message) if status == 400 else None,
        retry_after=_seconds(retry_after),
        lost=status == 502 or upstream,
        down=status == 503 and _NO_WORKERS in text,
        running=status == 502 or upstream,
    )


def _overflow(message: str) -> tuple[int | None, int | None] | None:
    if not _OVERFLOW.search(message):
        return None
    if total := _TOTAL.search(message):
        limit, tokens, answer = map(int, total.groups())
        return tokens, max(0, limit - answer)
    if sizes := _SIZES.search(message):
        tokens, limit = map(int, sizes.groups())
        return tokens, min(limit, tokens - 1)  # SGLang refuses a prompt of the limit's length too
    return None, None


def from_exception(error: Exception) -> Failure:
    """Return the failure for a request that got no complete answer because the connection was
    refused or reset, or the request timed out.
    """
    unsent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return Failure(
        message=f"{NO_ANSWER}{capped(reason(error), _MESSAGE)}",
        status=None,
        retry=True,
        lost=unsent or not isinstance(error, TimeoutError),
        running=not unsent,
    )


def broken_stream() -> Failure:
    """Return the failure for a stream that ends without its last event."""
    message = "the engine's stream broke off"
    return Failure(message=message, status=None, retry=True, lost=True, running=True)


def reason(error: Exception) -> str:
    """Return why no answer came, in the operating system's words if there are any."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if not isinstance(error, aiohttp.ClientConnectorError):
        return str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = str(error.certificate_error)
    elif isinstance(error.os_error, ssl.SSLError) or not error.os_error.errno:
        cause = str(error.os_error)
    else:
        cause = (
            os.strerror(error.os_error.errno) if error.os_error.errno > 0 else str(error.os_error)
        )
    return f"no connection to {error.host}:{error.port}: {cause}"


def without_server(why: str) -> str:
    """Return why no answer came, for a message that names the server and its address itself."""
    return _ADDRESS.sub("", why.removeprefix(NO_ANSWER))


def foreign(answer: Mapping[str, Any], rid: str) -> Failure | None:
    """Return a failure if `answer` belongs to a request other than `rid`, else None.

    An answer without an id is accepted. A retry may succeed, because some proxies return one
    request's answer to the next request.
    """
    meta = answer.get("meta_info")
    answer_id = meta.get("id") if isinstance(meta, Mapping) else None
    if not rid or answer_id is None or answer_id == rid:
        return None
    message = f"the answer is for another request: meta_info.id is {answer_id!r}, expected {rid!r}"
    return Failure(message=message, status=200, retry=True, running=True)


def message_of(text: str) -> str:
    """Return the message in an error body of any form: {"error": {"message"}}, {"error": "..."},
    {"message"}, or plain text.
    """
    try:
        data: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.strip()
    if isinstance(data, dict):
        error = data.get("error", data)
        if isinstance(error, dict):
            error = error.get("message") or error.get("code") or error
        return error if isinstance(error, str) else orjson.dumps(error).decode()
    return text.strip()


def _seconds(value: str | None) -> float | None:
    """Return how many seconds a `Retry-After` header asks to wait. Its value is this number or a
    date (RFC 9110, 10.2.3).
    """
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
