"""`UnnamedSessions`: the sessions of requests that name none. Each has one conversation.

Invariants: a request continues the session whose conversation it repeats furthest. A request
without a reply of the assistant continues none, and neither does one that repeats two sessions
equally. A request is compared only with sessions whose conversation begins with the same messages.
A retry belongs to the session of the request that it repeats.
"""

from __future__ import annotations

from toolroll.endpoint.conversation.messages import Digest, digests_of, opening
from toolroll.endpoint.dialects.dialect import ParsedRequest
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.rollout.runtime.threads import call_of_size


class UnnamedSessions:
    """The unnamed sessions of an endpoint."""

    def __init__(self) -> None:
        self._by_opening: dict[str, dict[str, LiveSession]] = {}

    def add(self, live: LiveSession) -> None:
        """Add `live`, unless a client named it."""
        if live.opening is not None:
            self._by_opening.setdefault(live.opening, {})[live.id] = live

    def remove(self, live: LiveSession) -> None:
        """Remove `live`, unless a client named it."""
        if live.opening is not None:
            del self._by_opening[live.opening][live.id]
            if not self._by_opening[live.opening]:
                del self._by_opening[live.opening]

    def all(self) -> list[LiveSession]:
        """Return the sessions."""
        return [live for same in self._by_opening.values() for live in same.values()]

    def with_response(self, live: LiveSession, response_id: object) -> LiveSession:
        """Return the session that stores the response `response_id`. If none does, or if a client
        named `live`, return `live`.
        """
        if live.opening is None or not isinstance(response_id, str):
            return live
        return next((other for other in self.all() if other.responses.get(response_id)), live)

    async def find(
        self, live: LiveSession, parsed: ParsedRequest, key: bytes, retry: int, *, large: bool
    ) -> LiveSession:
        """Return the session that the request `parsed` retries or continues. Return `live` if there
        is none, or if `live` is named or not new. `key`, `retry`, `large`: see
        `Endpoint.start_reply`.
        """
        if live.opening is None or live.added:
            return live
        live.opening = opening(parsed.messages)
        session = self._retried(live.opening, key, retry) if retry else None
        if session is None:
            session = await call_of_size(self._continued, live.opening, parsed, large=large)
        if session is None or session.id not in self._by_opening.get(live.opening, ()):
            return live  # the second: it ended while the thread compared it
        return session

    def _retried(self, first: str, key: bytes, retry: int) -> LiveSession | None:
        """Return the session of the request that is retried, or None. Of equal ones, the last."""
        same = reversed(self._by_opening.get(first, {}).values())
        lives = [live for live in same if live.retry_rank(key, retry) is not None]
        return min(lives, key=lambda live: live.retry_rank(key, retry) or 0, default=None)

    def _continued(self, first: str, parsed: ParsedRequest) -> LiveSession | None:
        """Return the session that `parsed`, whose opening is `first`, continues, or None. This may
        run in a thread.
        """
        messages, last_schemas, digests = parsed.messages, None, list[Digest]()
        best, fitting = (0, 1), list[LiveSession]()  # it continues no session that fits worse
        if all(message["role"] != "assistant" for message in messages):
            return None
        for live in list(self._by_opening.get(first, {}).values()):
            schemas = live.tree.schemas_with(parsed.tools)
            if schemas != last_schemas:  # mostly they are those of the last session
                last_schemas, digests = schemas, digests_of(messages, schemas)
            fit = live.tree.fit(messages, digests)
            if fit > best:
                best, fitting = fit, []
            if fit == best:
                fitting.append(live)
        return fitting[0] if len(fitting) == 1 else None
