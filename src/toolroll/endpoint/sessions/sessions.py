"""`Sessions`: creates, finds, limits and drops the sessions of an endpoint.

Invariants: an id is validated before it is used. The key of one session does not open others. A
session is dropped if it has no request in flight and was not used for the idle time. If the
endpoint is full, a new session takes the place of an unnamed one without a request in flight. Once
the server stops, no session is found, created or dropped.
The sessions that are kept on disk then belong to the next server.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from toolroll.endpoint.conversation.completions import CompletionIndex
from toolroll.endpoint.conversation.conversation_tree import ConversationTree
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.errors import ApiError, server_stopping
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.pending import PendingRequest, PendingRequests
from toolroll.endpoint.sessions.unnamed_sessions import UnnamedSessions
from toolroll.rollout.session.session import Session

logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


def check_id(session_id: str) -> str:
    """Return `session_id`. Raises `ApiError` if it is not valid."""
    if not _ID.fullmatch(session_id):
        problem = (
            "a session id has 1 to 128 characters: letters, digits and . _ : @ -, and begins with "
            "a letter or a digit"
        )
        raise ApiError(400, "invalid_session_id", problem, param="session_id")
    return session_id


class Store(Protocol):
    """Keeps sessions on disk. `SessionStore` implements this interface."""

    def begin(self, live: LiveSession) -> None:
        """Record on disk that the session `live` exists. Raises `ApiError` if the disk is full or
        has failed.
        """
        ...

    def finish(self, live: LiveSession) -> asyncio.Task[Any]:
        """Start a task that aborts the requests of `live`, writes `live` as a finished session, and
        returns the data about it that clients get. New requests must not find `live` any more. A
        failure is also logged.
        """
        ...

    def file_of(self, session_id: str) -> Path | None:
        """Return the file of the finished session `session_id`, or None if there is none."""
        ...


class Sessions:
    """All sessions of an endpoint, the least recently used first. `open_session`: that of `Model`.
    `store` keeps the sessions on disk; if it is None, they are kept in memory only.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        open_session: Callable[[str], Callable[[], int]],
        store: Store | None = None,
    ) -> None:
        self._settings = settings
        self._open_session = open_session
        self._store = store
        self._sessions: OrderedDict[str, LiveSession] = OrderedDict()
        self.unnamed = UnnamedSessions()
        self.closed = False
        """True once the server stops."""

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[LiveSession]:
        """Return the sessions, the least recently used first."""
        return list(self._sessions.values())

    def check_open(self) -> None:
        """Raise `ApiError` (503) if the server stops."""
        if self.closed:
            raise server_stopping()

    def new_unnamed(self) -> LiveSession:
        """Return a new session that has no name of a client, only a generated id. Requests cannot
        find it yet.
        """
        live = self.empty(f"unnamed-{uuid.uuid4().hex}")
        live.opening = ""
        return live

    def create(
        self, session_id: str, sampling_params: Mapping[str, Any] | None = None
    ) -> LiveSession:
        """Return a new session. Raises `ApiError` if the id is taken or the endpoint is full."""
        self.check_open()
        check_id(session_id)
        self.drop_idle()
        if session_id in self._sessions:
            raise ApiError(
                409,
                "session_exists",
                f"the session {session_id!r} exists already",
                param="session_id",
            )
        live = self.empty(session_id)
        live.sampling_params = sampling_params or {}
        self.add(live)
        return live

    def add(self, live: LiveSession) -> None:
        """Add `live`, so that other requests can find it. Do nothing if `live` is already added.
        Raises `ApiError` if the endpoint is full, or if the server stops.
        """
        self.check_open()
        if live.added:
            return
        self.drop_idle()
        self._make_room()
        if len(self._sessions) >= self._settings.max_sessions:
            raise ApiError(
                429,
                "too_many_sessions",
                f"this endpoint has {len(self)} sessions, which is its limit: delete some",
                retry=True,
            )
        if self._store is not None:
            self._store.begin(live)
        self._take(live)

    def _make_room(self) -> None:
        """If the endpoint is full, drop the least recently used unnamed session that has no request
        in flight: an agent that names no session does not delete its sessions.
        """
        lives = self.all() if len(self) >= self._settings.max_sessions else []
        idle = (live for live in lives if live.opening is not None and not live.pending.in_flight)
        oldest = next(idle, None)
        if oldest is not None:
            logger.info("the unnamed session %s ends: the endpoint is full", oldest.id)
            self.discard(oldest.id)

    def _take(self, live: LiveSession) -> None:
        self._sessions[live.id] = live
        self.unnamed.add(live)
        live.added = True
        live.end_at_engine = self._open_session(live.id)

    def empty(self, session_id: str) -> LiveSession:
        """Return a new session that requests cannot find yet."""
        session = Session(session_id)
        tree, texts = ConversationTree(session), CompletionIndex(session)
        pending = PendingRequests(self._settings.grace)
        return LiveSession(session, tree, pending, texts, added=False)

    def restore(self, lives: Iterable[LiveSession]) -> None:
        """Add sessions that were restored from disk."""
        for live in lives:
            self._take(live)

    def of(self, session_id: str) -> LiveSession:
        """Return the session `session_id`. If it does not exist, return a new session, which other
        requests cannot find yet. Raise `ApiError` if the server stops.
        """
        self.check_open()
        live = self._sessions.get(check_id(session_id))
        return self._touched(live) if live is not None else self.empty(session_id)

    def current(self, live: LiveSession) -> LiveSession:
        """Return `live`. But if `live` is not added, and another request added a session with the
        same id in the meantime, return that session.
        """
        return live if live.added else self._sessions.get(live.id, live)

    def get(self, session_id: str) -> LiveSession | None:
        """Return the session or None. This does not restart its idle time."""
        return self._sessions.get(session_id)

    def find(self, session_id: str) -> LiveSession:
        """Return the session. Raise `ApiError` if there is none (404) or the server stops (503)."""
        self.check_open()
        live = self._sessions.get(check_id(session_id))
        if live is None:
            message = self._why_missing(session_id)
            raise ApiError(404, "session_not_found", message, param="session_id")
        return self._touched(live)

    def _why_missing(self, session_id: str) -> str:
        if self._store is None:  # which would know the finished ones
            return f"there is no unfinished session {session_id!r}: GET /sessions lists them"
        file = self._store.file_of(session_id)
        if file is None:
            return f"there is no session {session_id!r}: GET /sessions lists the sessions"
        return f"the session {session_id!r} is finished, or is being finished: see {file}"

    def _touched(self, live: LiveSession) -> LiveSession:
        """Restart the idle time of `live`."""
        live.used = time.monotonic()
        if self._sessions.get(live.id) is live:
            self._sessions.move_to_end(live.id)
        return live

    def start(self, live: LiveSession, request: PendingRequest, retry: int) -> None:
        """Add `live` if it is not added yet, and start `request` in it. `retry`: the number of the
        retry, 0 for a first attempt. If the answer to the request was restored from disk, a retry
        gets this answer.

        The idle time of the session starts again when the request ends. The session stays added if
        the request fails.
        """
        self.add(live)
        stored = live.restored.get(request.key) if retry else None
        live.pending.start(request)
        request.joined = retry
        if stored:
            request.stored, request.committed = stored.pop(), True
        request.task.add_done_callback(lambda _: live.ended(request))
        request.task.add_done_callback(lambda _: self._touched(live))

    def discard(self, session_id: str) -> None:
        """Drop a session if it exists, and cancel its requests in flight. If there is a store,
        finish the session in the background. Do nothing once the server stops, because `aclose` has
        already ended the sessions.
        """
        if self.closed:
            return
        live = self._sessions.get(session_id)
        if live is not None:
            self._remove(live)
            live.pending.cancel()
            if self._store is not None:
                self._store.finish(live)

    def _remove(self, live: LiveSession) -> None:
        del self._sessions[live.id]
        self.unnamed.remove(live)
        live.end_at_engine()

    async def drop(self, session_id: str) -> Any:
        """Drop a session, and wait until its requests in flight are aborted. Return the store's
        data about the session, or None if there is no store.
        """
        live = self.find(session_id)
        self._remove(live)
        if self._store is not None:
            return await asyncio.shield(self._store.finish(live))
        await live.end()
        return None

    def put_back(self, live: LiveSession) -> None:
        """Add the session `live` again, because it could not be finished, and restart its idle
        time. Do nothing if another session uses its name already. `live` gets no more answers, but
        its tokens can be read, and it can be dropped again.
        """
        if not self.closed and self._sessions.setdefault(live.id, live) is live:
            live.added, live.opening = True, None  # so no request continues it
            self._touched(live)

    def drop_idle(self) -> None:
        """Drop the sessions that were not used for the idle time, with no request in flight."""
        limit = time.monotonic() - self._settings.idle
        for session_id, live in list(self._sessions.items()):
            if live.used > limit:
                return
            if not live.pending.in_flight:
                self.discard(session_id)

    async def aclose(self) -> list[LiveSession]:
        """Abort all requests in flight, accept no more, and return the sessions."""
        self.closed = True
        lives = self.all()
        for live in lives:
            live.end_at_engine()
        await asyncio.gather(*(live.end() for live in lives))
        return lives
