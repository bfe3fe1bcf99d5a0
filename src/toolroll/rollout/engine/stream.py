"""Read the event stream of `/generate` with `stream: true`: report progress, and return the last
event as the answer.

Invariants:

- Events are cumulative (SGLang 0.5.23). So the last event is the whole answer, and is checked like
  any other answer. Only the ids of earlier events are read, because reading their logprobs too
  would take quadratic time.
- Ids are reported only after a check: they belong to this request, the model can sample them, and
  ids that were reported before have not changed.
- An event with an error is a failure. If a stream ends before its last event, this counts as a
  broken connection.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import orjson

from toolroll.rollout.engine.errors import Failure, broken_stream, foreign, from_response
from toolroll.rollout.errors import CompletionError
from toolroll.rollout.runtime.sequences import common_prefix

Progress = Callable[[Sequence[int]], None]
"""A function that is called with all ids sampled so far, whenever there are more."""

_DONE = b"[DONE]"
# Neither pattern matches inside a JSON string, because quotes are escaped there.
_IDS = re.compile(rb'"output_ids"\s*:\s*(\[[\d,\s]*\])')
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')


class EventReader:
    """Reads the stream that answers the request `rid`.

    `check` raises `CompletionError` for ids that cannot be an answer.
    """

    def __init__(self, progress: Progress, rid: str, check: Callable[[Any], object]) -> None:
        self._progress = progress
        self._rid = rid
        self._own = orjson.dumps(rid)
        self._check = check
        self._reported: list[int] = []

    @property
    def started(self) -> bool:
        """True if any token was sampled."""
        return bool(self._reported)

    async def read(self, chunks: AsyncIterator[bytes]) -> Mapping[str, Any] | Failure:
        """Return the last event, or a `Failure` if an event reports an error or the stream breaks
        off.

        Raise `CompletionError` for an event that is not part of an answer.
        """
        buffer = b""
        last: Mapping[str, Any] | None = None
        async for chunk in chunks:
            *events, buffer = (buffer + chunk).split(b"\n\n")
            data = [
                event.partition(b"data:")[2].strip()
                for event in events
                if event.lstrip().startswith(b"data:")
            ]
            fresh = [item for item in data if item != _DONE]
            if fresh:
                # events are cumulative: the last one contains all ids of the earlier ones
                found = self._take(fresh[-1])
                if isinstance(found, Failure):
                    return found
                last = found
            if _DONE in data:
                break
        if last is None or _finish(last) is None:
            return broken_stream()
        return last

    def _take(self, data: bytes) -> Mapping[str, Any] | Failure | None:
        """Report the ids of one event. Return the event if it is the last one, a `Failure` if it
        reports an error or belongs to a different request, and None otherwise.
        """
        own = self._own in data or b'"id"' not in data
        unfinished = _IDS.search(data) if own and _UNFINISHED.search(data) else None
        if unfinished is not None:
            self._report(_decoded(unfinished[1]))
            return None
        event = _event(data)
        failure = _failure(event) or foreign(event, self._rid)
        if failure is None:
            self._report(event.get("output_ids") or [])
        return failure or event

    def _report(self, ids: list[int]) -> None:
        self._check(ids)
        if ids[: len(self._reported)] != self._reported:
            at = common_prefix(self._reported, ids)
            raise CompletionError(
                f"the engine's stream changed ids that it had already sent: output_ids[{at}] was "
                f"{self._reported[at]}, now it is {ids[at] if at < len(ids) else 'missing'} "
                f"({len(self._reported)} ids before, {len(ids)} now)"
            )
        self._reported = ids
        self._progress(ids)


def _event(data: bytes) -> Mapping[str, Any]:
    event = _decoded(data)
    if not (
        isinstance(event, dict)
        and isinstance(event.get("meta_info") or {}, dict)
        and isinstance(event.get("output_ids") or [], list)
    ):
        raise CompletionError(f"an event of the engine's stream is not valid: {data[:200]!r}")
    return event


def _decoded(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CompletionError(
            f"an event of the engine's stream is not JSON: {error}: {data[:200]!r}"
        ) from error


def _finish(event: Mapping[str, Any]) -> Any:
    """Return the finish reason of an event, which is None before the last event."""
    return (event.get("meta_info") or {}).get("finish_reason")


def _failure(event: Mapping[str, Any]) -> Failure | None:
    """Return the failure that an event reports, or None.

    SGLang sends failures with status 200 in two forms: `{"error": {..., "code": 400}}`, or an abort
    with a status code.
    """
    if "error" in event:
        error = event["error"]
        code = error.get("code") if isinstance(error, Mapping) else None
        return from_response(code if isinstance(code, int) else 400, orjson.dumps(event))
    finish = _finish(event)
    if isinstance(finish, Mapping) and finish.get("type") == "abort":
        status, message = finish.get("status_code"), finish.get("message")
        if isinstance(status, int) and status >= 400:
            return from_response(status, orjson.dumps({"error": {"message": message}}))
    return None
