"""The event stream of `/generate` with `stream: true`: progress while it runs, the last event as the answer.

Invariants: events are cumulative (SGLang 0.5.23), so the last one is the whole answer and is checked like any other, and of those
before it only the ids are read (their logprobs would make a stream quadratic); an event that holds an error is a failure; a stream
that ends without its last event is a broken connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from toolroll.rollout.engine.failures import Failure, from_response
from toolroll.rollout.errors import CompletionError

Progress = Callable[[Sequence[int]], None]
"""Called with all ids sampled so far, whenever there are more."""

_DONE = b"[DONE]"
# Neither is found in a JSON string: there the quote that ends the name would have a backslash before it.
_IDS = re.compile(rb'"output_ids"\s*:\s*(\[[\d,\s]*\])')
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')


async def read_stream(response: aiohttp.ClientResponse, progress: Progress) -> Mapping[str, Any] | Failure:
    """The last event's body; a `Failure` where the stream says so or breaks off. Raises `CompletionError` for what is no event."""
    buffer = b""
    last: Mapping[str, Any] | None = None
    async for chunk in response.content.iter_any():
        *events, buffer = (buffer + chunk).split(b"\n\n")
        data = [event.partition(b"data:")[2].strip() for event in events if event.lstrip().startswith(b"data:")]
        fresh = [item for item in data if item != _DONE]
        if fresh:
            newest = fresh[-1]  # cumulative: those before it say nothing that it does not
            ids = _IDS.search(newest) if _UNFINISHED.search(newest) else None
            if ids is not None:
                last = None
                progress(_decoded(ids[1]))
            else:
                last = _event(newest)
                failure = _failure(last)
                if failure is not None:
                    return failure
                progress(last.get("output_ids") or ())
        if _DONE in data:
            break
    if last is None or not _ended(last):
        return Failure(message="the engine's stream broke off", status=None, retry=True)
    return last


def _event(data: bytes) -> Mapping[str, Any]:
    event = _decoded(data)
    if not (
        isinstance(event, dict) and isinstance(event.get("meta_info") or {}, dict) and isinstance(event.get("output_ids") or [], list)
    ):
        raise CompletionError(f"an event of the engine's stream is no answer: {data[:200]!r}")
    return event


def _decoded(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CompletionError(f"an event of the engine's stream is no JSON: {error}: {data[:200]!r}") from error


def _ended(event: Mapping[str, Any]) -> bool:
    meta: Mapping[str, Any] = event.get("meta_info") or {}
    return meta.get("finish_reason") is not None


def _failure(event: Mapping[str, Any]) -> Failure | None:
    """Errors come as events under a 200: `{"error": {..., "code": 400}}`, or an abort with a status code."""
    if "error" in event:
        error = event["error"]
        code = error.get("code") if isinstance(error, Mapping) else None
        return from_response(code if isinstance(code, int) else 400, orjson.dumps(event))
    meta: Mapping[str, Any] = event.get("meta_info") or {}
    finish = meta.get("finish_reason")
    status = finish.get("status_code") if isinstance(finish, Mapping) and finish.get("type") == "abort" else None
    if isinstance(finish, Mapping) and isinstance(status, int) and status >= 400:
        return from_response(status, orjson.dumps({"error": {"message": finish.get("message")}}))
    return None
