"""The event stream of `/generate` with `stream: true`: progress while it runs, the last event as the answer.

Invariants: events are cumulative (SGLang 0.5.23), so the last one is the whole answer and is checked like any other; an event that
holds an error is a failure; a stream that ends without its last event is a broken connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from toolroll.rollout.engine.failures import Failure, from_response

Progress = Callable[[Sequence[int]], None]
"""Called with all ids sampled so far, whenever there are more."""

_DONE = b"[DONE]"


async def read_stream(response: aiohttp.ClientResponse, progress: Progress) -> Mapping[str, Any] | Failure:
    """The last event's body; a `Failure` where the stream says so or breaks off."""
    buffer = b""
    last: Mapping[str, Any] | None = None
    async for chunk in response.content.iter_any():
        *events, buffer = (buffer + chunk).split(b"\n\n")
        data = [event.partition(b"data:")[2].strip() for event in events if event.lstrip().startswith(b"data:")]
        fresh = [item for item in data if item != _DONE]
        if fresh:
            event: Mapping[str, Any] = orjson.loads(fresh[-1])  # cumulative: those before it say nothing that it does not
            failure = _failure(event)
            if failure is not None:
                return failure
            progress(event.get("output_ids") or ())
            last = event
        if _DONE in data:
            break
    if last is None or not _ended(last):
        return Failure(message="the engine's stream broke off", status=None, retry=True)
    return last


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
