"""Read the event stream of `/generate` with `stream: true`: report progress, and return the whole
answer.

Events have one of two forms (SGLang 0.5.23). A cumulative event has all ids and logprobs so far. An
incremental event has only the new ones (`--incremental-streaming-output`). In both forms, the
event's `completion_tokens` counts all ids so far. So it shows the form: it is the number of the
event's ids, or larger by the number of ids that were sent before.

Invariants:

- The answer is the last event. If the events are incremental, it gets the ids, logprobs and texts
  of all events. The last cumulative event may have no ids if its count shows that none is new: then
  it gets those of the event before it. The answer is checked like any other answer.
- Of a cumulative event that is not the last, only the ids are read, because reading the logprobs
  too would take quadratic time.
- If an event has neither form, or a different form from the others, the answer is refused.
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
from toolroll.rollout.runtime.jsonable import common_prefix

Progress = Callable[[Sequence[int]], None]
"""A function that is called with all ids sampled so far, whenever there are more."""

_DONE = b"[DONE]"
# Neither pattern matches inside a JSON string, because quotes are escaped there.
_IDS = re.compile(rb'"output_ids"\s*:\s*(\[[\d,\s]*\])')
_COUNT = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')
_LISTS = ("output_token_logprobs", "output_top_logprobs")
"""The fields of `meta_info` of which an incremental event has only the new entries."""


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
        self._cumulative: bool | None = None  # None: the first ids have the same form in both
        self._parts: list[bytes] = []  # all events, or the last one that has ids if cumulative

    @property
    def started(self) -> bool:
        """True if any token was sampled."""
        return bool(self._reported)

    async def read(self, chunks: AsyncIterator[bytes]) -> Mapping[str, Any] | Failure:
        """Return the answer, or a `Failure` if an event reports an error or the stream breaks off.

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
            for index, item in enumerate(fresh):
                if self._cumulative and index < len(fresh) - 2:
                    continue  # the last two contain all ids: the last one may be empty
                outcome = self._take(item)
                if isinstance(outcome, Failure):
                    return outcome
                last = outcome
            if _DONE in data:
                break
        if last is None or _finish(last) is None:
            return broken_stream()
        if self._cumulative is None or (self._cumulative and last.get("output_ids")):
            return last
        return _joined(last, self._reported, self._parts)

    def _take(self, data: bytes) -> Mapping[str, Any] | Failure | None:
        """Report the ids of one event. Return the event if it is the last one, a `Failure` if it
        reports an error or belongs to a different request, and None otherwise.
        """
        is_own = self._own in data or b'"id"' not in data
        unfinished = _IDS.search(data) if is_own and _UNFINISHED.search(data) else None
        if unfinished is not None:
            count = _COUNT.search(data)
            self._add(_decoded(unfinished[1]), int(count[1]) if count else None, data)
            return None
        event = _event(data)
        failure = _failure(event) or foreign(event, self._rid)
        if failure is None:
            count = (event.get("meta_info") or {}).get("completion_tokens")
            self._add(event.get("output_ids") or [], count, data, last=True)
        return failure or event

    def _add(self, ids: list[int], count: Any, event: bytes, *, last: bool = False) -> None:
        """Report the ids of one event, whose `completion_tokens` is `count`."""
        sent = self._reported
        if count == len(sent) and ids == sent[-1:] != sent and self._cumulative is not True:
            # An abort in the queue repeats the last id of a retracted request.
            self._cumulative = False
            return
        if self._cumulative and last and not ids and count == len(sent):
            return
        if sent:
            # SGLang may write the list of a cumulative event after it has grown further.
            cumulative = type(count) is int and count <= len(ids)
            if not cumulative and count != len(sent) + len(ids):
                raise CompletionError(
                    f"an event of the engine's stream has {len(ids)} output_ids and counts "
                    f"{count!r} completion_tokens, after {len(sent)} output_ids: it is neither "
                    "cumulative nor incremental"
                )
            if self._cumulative is not None and cumulative is not self._cumulative:
                raise CompletionError(
                    "the engine's stream has both cumulative and incremental events: "
                    f"{len(ids)} output_ids with {count} completion_tokens after {len(sent)}"
                )
            self._cumulative = cumulative
        if self._cumulative:
            self._parts = [event]
        else:
            self._parts.append(event)
            ids = [*sent, *ids]
        self._check(ids)
        if ids[: len(sent)] != sent:
            position = common_prefix(sent, ids)
            raise CompletionError(
                f"the engine's stream changed ids that it had already sent: output_ids[{position}] "
                f"was {sent[position]}, now it is "
                f"{ids[position] if position < len(ids) else 'missing'} "
                f"({len(sent)} ids before, {len(ids)} now)"
            )
        self._reported = ids
        self._progress(ids)


def _joined(last: Mapping[str, Any], ids: list[int], parts: Sequence[bytes]) -> Mapping[str, Any]:
    """Return the answer: the event `last` with `ids`, and the text and the logprobs of `parts`."""
    events = [_event(part) for part in parts]
    metas = [event.get("meta_info") or {} for event in events]
    lists = {
        name: [item for meta in metas for item in meta.get(name) or ()]
        for name in _LISTS
        if any(name in meta for meta in metas)
    }
    return {
        **last,
        "text": "".join(event.get("text") or "" for event in events),
        "output_ids": ids,
        "meta_info": {**last["meta_info"], **lists},
    }


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
