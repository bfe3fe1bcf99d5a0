"""`Sessions`: creates, finds, limits and drops the sessions of an endpoint.

Invariants: an id is validated before it is used. The key of one session does not open others. A
session is dropped if it has no request in flight and was not used for the idle time. A request
without a session leaves no data. Once the server stops, no session is found, created or dropped.
The sessions that are kept on disk then belong to the next server.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

from toolroll.rollout.server.answers.result import CompletionResult, StoredAnswer
from toolroll.rollout.server.conversation.completion_index import CompletionIndex
from toolroll.rollout.server.conversation.conversation_tree import ConversationTree, Prompt
from toolroll.rollout.server.conversation.stored_response import KeptResponse, ResponseStore
from toolroll.rollout.server.conversation.turn import TurnNode
from toolroll.rollout.server.endpoint_settings import EndpointSettings
from toolroll.rollout.server.errors import ApiError, server_stopping
from toolroll.rollout.server.sessions.pending import PendingRequest, PendingRequests
from toolroll.rollout.session.node import Node
from toolroll.rollout.session.session import Session
from toolroll.rollout.template.record import AnswerRecord
from toolroll.rollout.types import IdArray

Run = Callable[[PendingRequest[CompletionResult]], Awaitable[CompletionResult]]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


def check_id(session_id: str) -> str:
    """Return `session_id`. Raises `ApiError` if it is not valid."""
    if not _ID.fullmatch(session_id):
        words = (
            "a session id has 1 to 128 characters: letters, digits and . _ : @ -, and begins with "
            "a letter or a digit"
        )
        raise ApiError(400, "invalid_session_id", words, param="session_id")
    return session_id


class Log(Protocol):
    """Writes one session to disk. `SessionLog` implements this interface. The futures that its
    methods return are done once the data is on disk.
    """

    ended: bool

    def check(self) -> None:
        """Raise `ApiError` if the session has ended, or if nothing more can be saved."""
        ...

    async def saved(self) -> None:
        """Wait until everything that was written so far is on disk."""
        ...

    def reward(self, reward: float, info: Mapping[str, Any]) -> asyncio.Future[None]:
        """Write the session's reward."""
        ...

    def chat(
        self,
        prompt: Prompt,
        result: CompletionResult,
        request_key: bytes,
        nodes: Sequence[Node],
        *,
        switches: Mapping[str, Any],
        kind: str,
        lineage: Mapping[str, str],
        kept: KeptResponse | None,
    ) -> asyncio.Future[None]:
        """Write the answers to a chat request, which were committed as `nodes`."""
        ...

    def text(
        self,
        parent: Node | None,
        delta: IdArray,
        fork_reason: str | None,
        result: CompletionResult,
        request_key: bytes,
        nodes: Sequence[Node],
    ) -> asyncio.Future[None]:
        """Write the answers to a text completion request, which were committed as `nodes`."""
        ...


@dataclass(slots=True, eq=False)
class LiveSession:
    """One session: its tree, its requests in flight and its reward.

    `trace`: the sampled nodes in the order in which they were returned, each with the name of its
    API. `texts`: the nodes of text completions. `answers`: the number of answers to each prompt,
    by the digest of the conversation. `mismatches`: the number of verification failures of each
    kind, and under "preserved", the number of prompts with tokens that the chat template would
    have rewritten.
    """

    session: Session
    tree: ConversationTree
    pending: PendingRequests[CompletionResult]
    texts: CompletionIndex
    added: bool
    """False until other requests can find the session."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    trace: list[tuple[Node, str]] = field(default_factory=list)
    answers: Counter[bytes] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    checks: dict[TurnNode, asyncio.Task[None]] = field(default_factory=dict)
    """The verifications that are running."""
    record: AnswerRecord = field(default_factory=AnswerRecord)
    responses: ResponseStore = field(default_factory=ResponseStore)
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    requests: WeakValueDictionary[int, PendingRequest[CompletionResult]] = field(
        default_factory=WeakValueDictionary
    )
    """The requests whose answers are kept for a retry, by the index of the answer's node."""
    log: Log | None = None
    """It is None if the session is kept in memory only."""
    sample: int = 0
    """The number of earlier sessions with the same name."""
    restored: dict[bytes, list[StoredAnswer]] = field(default_factory=dict)
    """The answers that were restored from disk, by the key of their request."""

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.session_id

    @property
    def key(self) -> tuple[str, int]:
        """The session's identity, which is unique even among sessions with the same name."""
        return self.id, self.sample

    def number(self, prompt: Prompt, choices: int, stored: StoredAnswer | None) -> int:
        """Return the number of earlier answers to `prompt`, and add `choices` to this number. If
        the answer was restored from disk (`stored`), return the number of answers before it, and
        add nothing.
        """
        if stored is not None:
            return stored.first
        first = self.answers[prompt.digest]
        self.answers[prompt.digest] += choices
        return first

    def as_served(self, prompt: Prompt, stored: StoredAnswer | None) -> Prompt:
        """Return `prompt`. If the answer was restored from disk (`stored`), replace the ids of the
        prompt with the ids from which the answer was sampled.
        """
        if stored is None:
            return prompt
        return replace(prompt, input_ids=self.prompt_of(stored), turn=None)

    def forget_request(self, turn: TurnNode) -> None:
        """Drop the request that produced `turn`, because a later request continues the turn, which
        shows that the client has it.
        """
        request = self.requests.pop(turn.node.index, None)
        if request is not None:
            self.pending.forget(request)

    def prompt_of(self, stored: StoredAnswer) -> IdArray:
        """Return the ids from which `stored` was sampled."""
        return self.session.path_ids(stored.nodes[0].parent)

    def call_id_seeds(self, prompt_length: int, first: int, choices: int) -> list[str]:
        """Return one seed for each new answer to a prompt. The ids of an answer's tool calls are
        derived from its seed. `prompt_length`: the prompt's number of tokens. `first`: the number
        of earlier answers. `choices`: the number of new answers.
        """
        return [
            f"{self.id}/{prompt_length}" + (f"/{nth}" if nth else "")
            for nth in range(first, first + choices)
        ]

    def check(self) -> None:
        """Raise `ApiError` if the session cannot get another answer."""
        if self.log is not None:
            self.log.check()

    async def checked(self) -> None:
        """Wait for the running verifications, and raise their errors. Cancelling the caller does
        not cancel them.
        """
        if self.checks:
            finished, _ = await asyncio.wait(self.checks.values())
            for task in finished:
                if task.cancelled():
                    raise ApiError(
                        409, "request_aborted", "the session was deleted while it was verified"
                    )
                task.result()

    def check_done(self, turn: TurnNode, kind: str | None) -> None:
        """Record the result of verifying the sequence that ends with `turn`. `kind` is the kind of
        mismatch, or None if there is none. A mismatch is counted once per turn.
        """
        if not turn.checked and kind is not None:
            self.mismatches[kind] += 1
        turn.checked = True

    def record_check(self) -> Callable[[], str | None]:
        """Return a function that compares the session's present trajectories with the engine's
        answers, and returns the kind of the first mismatch, or None. It may run in a thread.
        """
        return partial(self.record.copy().check, self.session.trajectories())

    def record_checked(self, kind: str | None) -> None:
        """Record the result of `record_check`."""
        if kind is not None:
            self.mismatches[kind] = 1

    def exclude_wrong(self) -> None:
        """Exclude the whole session from training if a verification found a mismatch."""
        for kind in self.mismatches:
            if kind != "preserved":
                self.session.exclude(f"verification: {kind}")


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


class Sessions:
    """All sessions of an endpoint, the least recently used first. `store` keeps them on disk; if it
    is None, they are kept in memory only.
    """

    def __init__(self, settings: EndpointSettings, store: Store | None = None) -> None:
        self._settings = settings
        self._store = store
        self._sessions: OrderedDict[str, LiveSession] = OrderedDict()
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

    def ephemeral(self) -> LiveSession:
        """Return a session for one request. Other requests cannot find it, and it is not stored."""
        return _new(f"ephemeral-{uuid.uuid4().hex}", grace=0.0, added=True)

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
        """Add `live`, so that other requests can find it. Do nothing if `live` is already added, or
        is for one request only. Raises `ApiError` if the endpoint is full, or if the server stops.
        """
        self.check_open()
        if live.added:
            return
        self.drop_idle()
        if len(self._sessions) >= self._settings.max_sessions:
            raise ApiError(
                429,
                "too_many_sessions",
                f"this endpoint has {len(self)} sessions, which is its limit: delete some",
                retry=True,
            )
        if self._store is not None:
            self._store.begin(live)
        self._sessions[live.id] = live
        live.added = True

    def empty(self, session_id: str) -> LiveSession:
        """Return a new session that requests cannot find yet."""
        return _new(session_id, grace=self._settings.grace, added=False)

    def restore(self, lives: Iterable[LiveSession]) -> None:
        """Add sessions that were restored from disk."""
        for live in lives:
            self._sessions[live.id] = live
            live.added = True

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
        """Return the session, or None if it does not exist. This call does not restart its idle
        time.
        """
        return self._sessions.get(session_id)

    def find(self, session_id: str) -> LiveSession:
        """Return the session. Raises `ApiError` if there is none (404), or if the server stops
        (503).
        """
        self.check_open()
        live = self._sessions.get(check_id(session_id))
        if live is None:
            raise ApiError(
                404, "session_not_found", f"there is no session {session_id!r}", param="session_id"
            )
        return self._touched(live)

    def _touched(self, live: LiveSession) -> LiveSession:
        """Restart the idle time of `live`."""
        live.used = time.monotonic()
        if self._sessions.get(live.id) is live:
            self._sessions.move_to_end(live.id)
        return live

    def start(
        self, live: LiveSession, key: bytes, choices: int, run: Run, retry: int
    ) -> PendingRequest[CompletionResult]:
        """Add `live` if it is not added yet, start the request with the key `key` (`request_key`)
        in it, and return the request. `choices`: its number of answers. `run` returns its result.
        `retry`: the number of the retry, 0 for a first attempt. If the answer to the request was
        restored from disk, a retry gets this answer.

        The idle time of the session starts again when the request ends. The session stays added if
        the request fails.
        """
        self.add(live)
        pending = live.pending.start(key, choices, run)
        stored = live.restored.get(key) if retry else None
        if stored:
            pending.stored = stored.pop()
        pending.task.add_done_callback(lambda _: self._touched(live))
        return pending

    def discard(self, session_id: str) -> None:
        """Drop a session if it exists, and cancel its requests in flight. If there is a store,
        finish the session in the background. Do nothing once the server stops, because `aclose` has
        already ended the sessions.
        """
        if self.closed:
            return
        live = self._sessions.pop(session_id, None)
        if live is not None:
            live.pending.cancel()
            if self._store is not None:
                self._store.finish(live)

    async def drop(self, session_id: str) -> Any:
        """Drop a session, and wait until its requests in flight are aborted. Return the store's
        data about the session, or None if there is no store.
        """
        live = self.find(session_id)
        del self._sessions[session_id]
        if self._store is not None:
            return await asyncio.shield(self._store.finish(live))
        await end(live)
        return None

    def put_back(self, live: LiveSession) -> None:
        """Add the session `live` again, because it could not be finished, and restart its idle
        time. Do nothing if another session uses its name already. `live` gets no more answers, but
        its tokens can be read, and it can be dropped again.
        """
        if not self.closed and self._sessions.setdefault(live.id, live) is live:
            live.added = True
            self._touched(live)

    def drop_idle(self) -> None:
        """Drop the sessions that have not been used for the idle time and have no request in
        flight.
        """
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
        await asyncio.gather(*map(end, lives))
        return lives


def _new(session_id: str, *, grace: float, added: bool) -> LiveSession:
    session = Session(session_id)
    tree, texts = ConversationTree(session), CompletionIndex(session)
    return LiveSession(session, tree, PendingRequests(grace), texts, added=added)


async def end(live: LiveSession) -> None:
    """Abort the running requests and verifications of `live`, and wait until they have ended."""
    tasks: list[asyncio.Task[Any]] = [*live.pending.cancel(), *live.checks.values()]
    for check in live.checks.values():
        check.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
