"""Requests in flight and recent answers, for retries and closed connections.

Invariants:

- A retry (the SDKs mark it with a header) joins the request that its client abandoned, whether this
  request is still in flight or already answered. So nothing is sampled twice.
- A retry after an error is a new request. It does not join an equal request of another client.
- If no client waits for a request any more, the request is kept for the grace time, then aborted.
- Answers that are never returned are never committed, so they are not trained. There is one
  exception: if the client disconnects while its answer is being saved (`--out`), the answer is
  committed.
- If an answer cannot be committed, every client that waits for it gets an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import Context
from hashlib import sha256
from typing import Any

import orjson

from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.errors import ApiError, api_error
from toolroll.rollout.runtime.foreign import retrieve

_RETRY_WITHIN = 60.0
"""The number of seconds after an error during which a retry of the request is expected."""


class PendingRequest:
    """One request in flight, or its answer. A subclass overrides `run`.

    Attributes:
        key: The key that the request and its retries share (`request_key`).
        task: The task that runs the request and returns its result.
        waiting: The number of connections that wait for the result.
        committed: True once the result was added to the session.
        delivered: True once the result was returned to a client.
        joined: The highest retry number of the retries that started or joined the request.
        expiry: The timer that drops the request after the grace time.
        progress: The ids sampled so far, by choice.
        changed: Set whenever `progress` has grown, and at the end.
        stored: The answer to this request, if it was restored from disk.
        failure: The error, if the result could not be committed.
    """

    def __init__(self, key: bytes, choices: int) -> None:
        self.key = key
        self.task: asyncio.Task[CompletionResult]
        self.progress: list[list[int]] = [[] for _ in range(choices)]
        self.waiting = 0
        self.committed = False
        self.delivered = False
        self.joined = 0
        self.changed = asyncio.Event()
        self.expiry: asyncio.TimerHandle | None = None
        self.stored: CompletionResult | None = None
        self.failure: Exception | None = None

    async def run(self) -> CompletionResult:
        """Return the result of the request."""
        raise NotImplementedError

    def report(self, choice: int, ids: list[int]) -> None:
        """Record that `ids` are sampled for choice `choice`."""
        if len(ids) > len(self.progress[choice]):
            self.progress[choice] = ids
            self.wake()

    def wake(self) -> None:
        """Wake the streams that wait for more progress."""
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def in_flight(self) -> bool:
        """True if the request is not done, or if its client still waits for the answer's end."""
        return not self.task.done() or (self.waiting > 0 and not self.delivered)

    @property
    def failed(self) -> bool:
        """True if the request ended without a result, or if its result could not be committed."""
        return self.task.done() and (self.task.cancelled() or self.error is not None)

    @property
    def given_up(self) -> bool:
        """True if no client waits for the answer, and none got it."""
        return not self.waiting and not self.delivered

    @property
    def error(self) -> BaseException | None:
        """The error of a request that ended and was not cancelled."""
        return self.failure or self.task.exception()


class PendingRequests:
    """The requests of one session. `grace` is in seconds."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self.context: Context | None = None
        """The context in which the requests run, so that the limits and the stop of an episode hold
        for them. By default, it is that of the client's connection.
        """
        self._ended = False
        self._by_key: dict[bytes, list[PendingRequest]] = {}
        self._errors: dict[bytes, list[float]] = {}
        """For each request that got errors: the times after which a retry of it is no longer
        expected.
        """

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return sum(request.in_flight for request in self.all())

    @property
    def turns(self) -> int:
        """The number of turns that the requests in flight have not added to the session yet."""
        requests = [request for request in self.all() if request.in_flight]
        return sum(len(request.progress) for request in requests if not request.committed)

    def all(self) -> list[PendingRequest]:
        """Return the requests in flight and the requests whose answers are kept for a retry."""
        return [request for requests in self._by_key.values() for request in requests]

    def start(self, request: PendingRequest) -> None:
        """Run `request` in a task. Raise `ApiError` after `cancel`."""
        if self._ended:
            raise ApiError(
                409, "request_aborted", "the session has ended, and takes no more requests"
            )
        request.task = asyncio.get_running_loop().create_task(
            request.run(), context=self.context and self.context.copy()
        )
        request.task.add_done_callback(retrieve)  # no client may wait for it
        # also runs if the task is cancelled before it starts
        request.task.add_done_callback(lambda _: request.wake())
        self._by_key.setdefault(request.key, []).append(request)

    def retried(self, key: bytes, retry: int) -> PendingRequest | None:
        """Return the request that a retry joins. `key` is the key of the retried request, and
        `retry` is the number of the retry.

        A retry joins a request that its client abandoned. If there is none, it joins another
        request with the same key, because the server may not have noticed yet that the client
        closed the connection. The last choice is a request that this retry or a later one has
        joined. Return None if every such request failed, or if there is none. Also return None if
        the client retries because of an error and there is no abandoned request.
        """
        request = self.joinable(key, retry)
        if (request is None or not request.given_up) and self._follows_error(key):
            return None
        if request is not None:
            request.joined = max(request.joined, retry)
        return request

    def joinable(self, key: bytes, retry: int) -> PendingRequest | None:
        """Return the request that a retry joins (`retried`) unless it follows an error, or None."""
        # The last of equal requests: its client sent it again, so it has the earlier answers.
        alive = [request for request in reversed(self._by_key.get(key, ())) if not request.failed]
        return min(
            alive,
            key=lambda request: (request.joined >= retry, request.delivered, request.waiting > 0),
            default=None,
        )

    def expects(self, key: bytes) -> bool:
        """Return True if a client got an error for the request `key`, and did not retry it yet."""
        return key in self._errors

    def join(self, request: PendingRequest) -> None:
        """Count one more connection that waits for `request`."""
        request.waiting += 1
        if request.expiry is not None:
            request.expiry.cancel()
            request.expiry = None

    def leave(self, request: PendingRequest) -> None:
        """Count one connection fewer, because it got its answer or was closed. If no connection is
        left, the grace time starts.
        """
        request.waiting -= 1
        if request.failed and not request.task.cancelled():
            error = request.error
            if error is not None and api_error(error).retry:
                self.expect_retry(request.key)
        if request.waiting == 0:
            if self._grace == 0 or request.failed:  # retries do not join failed requests
                self._expire(request)
            else:
                request.expiry = asyncio.get_running_loop().call_later(
                    self._grace, self._expire, request
                )

    def expect_retry(self, key: bytes) -> None:
        """Expect a retry of the request `key`, because its client gets an error."""
        now = asyncio.get_running_loop().time()
        for old_key, ends in list(self._errors.items()):
            if ends[-1] < now:
                del self._errors[old_key]
        self._errors.setdefault(key, []).append(now + _RETRY_WITHIN)

    def _follows_error(self, key: bytes) -> bool:
        """Return True if a client is expected to retry the request `key` after an error. Each error
        counts for one retry only.
        """
        now = asyncio.get_running_loop().time()
        ends = [end for end in self._errors.pop(key, ()) if end >= now]
        if len(ends) > 1:
            self._errors[key] = ends[1:]
        return bool(ends)

    def forget(self, request: PendingRequest) -> None:
        """Drop the answered `request` before its grace time ends, because a later request shows
        that its client has the answer. Do nothing if a client still waits for the answer.
        """
        if request.waiting == 0 and request.delivered:
            if request.expiry is not None:
                request.expiry.cancel()
            self._expire(request)

    def _expire(self, request: PendingRequest) -> None:
        if request.waiting:
            return
        request.task.cancel()  # no effect on a finished task
        requests = self._by_key.get(request.key, [])
        if request in requests:
            requests.remove(request)
        if not requests:
            self._by_key.pop(request.key, None)

    def cancel(self) -> list[asyncio.Task[CompletionResult]]:
        """Cancel all requests and accept no more, because the session is dropped. Return the tasks
        of the cancelled requests.
        """
        self._ended = True
        for request in self.all():
            if request.expiry is not None:
                request.expiry.cancel()
        tasks = [request.task for request in self.all() if request.task.cancel()]
        self._by_key.clear()
        return tasks


def request_key(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return the key that a request and its retries share. `kind` names the API. The order of JSON
    keys in `body` does not matter.
    """
    text = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return sha256(kind.encode() + text).digest()[:16]  # OpenSSL's is faster than `blake2b`


def retry_number(header: str | None) -> int:
    """Return the number of the retry in the SDK's header. Return 0 for a first attempt."""
    return (
        int(header) if header and header.isascii() and header.isdigit() and len(header) < 6 else 0
    )
