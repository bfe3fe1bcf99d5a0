"""`LiveSession`: one session of an endpoint, to which answers are added.

Invariant: the token sequences of a session are verified with `transformers` and the tokenizer
alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.conversation.completions import CompletionIndex, TextPrompt
from toolroll.endpoint.conversation.conversation_tree import (
    ConversationTree,
    Prompt,
    TurnNode,
    sequence_of,
)
from toolroll.endpoint.conversation.messages import fork_advice
from toolroll.endpoint.conversation.stored_response import Origin, ResponseStore
from toolroll.endpoint.disk.session_log import SessionLog
from toolroll.endpoint.errors import ApiError, api_error
from toolroll.endpoint.sessions.pending import PendingRequest, PendingRequests
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.cursor import KEPT
from toolroll.rollout.template.record import AnswerRecord
from toolroll.rollout.template.verifier_pool import POOL

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveSession:
    """One session: its tree, its requests in flight and its reward.

    `trace`: the sampled nodes in the order in which they were returned, each with the name of its
    API. `texts`: the nodes of text completions. `answers`: the number of answers to each prompt,
    by the digest of the conversation. `mismatches`: the number of verification failures of each
    kind, and under "preserved" and "unshown", the number of prompts with tokens that the chat
    template would have rewritten or does not show. `ignored_fields`: the number of answered
    requests with each field that changes no token (`IgnoredFields`).
    """

    session: Session
    tree: ConversationTree
    pending: PendingRequests
    texts: CompletionIndex
    added: bool
    """False until other requests can find the session."""
    opening: str | None = None
    """If no client named the session: the digest of the first messages (`messages.opening`)."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    trace: list[tuple[Node, str]] = field(default_factory=list)
    answers: Counter[bytes] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    ignored_fields: Counter[str] = field(default_factory=Counter)
    advised: bool = False
    """True once the log has said how the client can avoid forks."""
    checks: dict[TurnNode, asyncio.Task[None]] = field(default_factory=dict)
    """The verifications that are running."""
    record: AnswerRecord = field(default_factory=AnswerRecord)
    responses: ResponseStore = field(default_factory=ResponseStore)
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    requests: WeakValueDictionary[int, PendingRequest] = field(default_factory=WeakValueDictionary)
    """The requests whose answers are kept for a retry, by the index of the answer's node."""
    log: SessionLog | None = None
    """It is None if the session is kept in memory only."""
    sample: int = 0
    """The number of earlier sessions with the same name."""
    end_at_engine: Callable[[], int] = lambda: 0
    """See `Model.open_session`."""
    restored: dict[bytes, list[CompletionResult]] = field(default_factory=dict)
    """The answers that were restored from disk, by the key of their request."""
    fixed_params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that requests cannot change."""
    max_turns: int | None = None
    """Requests that would add more turns are refused."""
    failures: dict[bytes, BaseException] = field(default_factory=dict)
    """The last failures of requests that did not succeed later, by the key of the request."""
    keep_failures: bool = False  # the tracebacks of `failures` hold whole requests
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `max_turns` is exceeded, or once the engine has aborted a request."""

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.session_id

    @property
    def key(self) -> tuple[str, int]:
        """The session's identity, which is unique even among sessions with the same name."""
        return self.id, self.sample

    def forget_request(self, turn: TurnNode) -> None:
        """Drop the request that produced `turn`, because a later request continues the turn, which
        shows that the client has it.
        """
        request = self.requests.pop(turn.node.index, None)
        if request is not None:
            self.pending.forget(request)

    def retry_rank(self, key: bytes, retry: int) -> int | None:
        """Return the rank of this session among those to which a retry may belong; the lowest is
        the best. Return None if this session had no such request, or if an earlier retry has got
        the answer: equal requests of several clients must not get the same answer.
        """
        request, stored = self.pending.joinable(key, retry), bool(self.restored.get(key))
        if request is not None and request.given_up:
            return 0
        if stored or self.pending.expects(key):
            return 1
        return None if request is None or request.joined else 2 + request.delivered

    def check(self) -> None:
        """Raise `ApiError` if the session cannot get another answer."""
        if self.log is not None:
            self.log.check()

    def check_turns(self, more: int) -> None:
        """Raise `ApiError` if `more` turns, with those in flight, exceed `max_turns`."""
        limit = self.max_turns
        if limit is not None and len(self.trace) + self.pending.turns + more > limit:
            self.stopped.set()
            raise ApiError(409, "turn_limit", f"the session would exceed its {limit} turns")

    def ended(self, request: PendingRequest) -> None:
        """Record whether the task of `request` failed because of the engine or of the endpoint."""
        if request.task.cancelled():
            return
        error = request.error
        if error is None:
            self.failures.pop(request.key, None)
            return
        refusal = api_error(error)
        if self.keep_failures and (refusal.status >= 500 or refusal.code == "engine_refused"):
            self.failures[request.key] = error
        if refusal.code == "engine_aborted":
            self.stopped.set()

    def add_chat(self, prompt: Prompt, result: CompletionResult, origin: Origin) -> list[TurnNode]:
        """Add the replies `result` to the session, and return their turns."""
        nodes, turns = self._add(self.tree.observe(prompt), result, origin.kind), []
        for node, choice in zip(nodes, result.choices, strict=True):
            assert choice.turn is not None
            turn = self.tree.commit(prompt, node, choice.turn)
            if origin.lineage:
                self.session.label(node, origin.lineage)
            if origin.response is not None:
                self.responses.add(turn, origin.response)
            turns.append(turn)
        self.mismatches += Counter(preserved=prompt.preserved, unshown=prompt.unshown)
        for choice in result.choices:
            if choice.completion.other_prompt is not None:
                logger.warning("session %s: %s", self.id, choice.completion.other_prompt)
                self.mismatches["images: engine"] += 1
        self._notice(prompt, origin)
        return turns

    def _notice(self, prompt: Prompt, origin: Origin) -> None:
        """Count the ignored fields, and log what is new about the client: once in a session."""
        new = [path for path in origin.ignored if path not in self.ignored_fields]
        self.ignored_fields.update(origin.ignored)
        if new:
            fields = ", ".join(new)
            logger.warning("session %s: fields that change no token: %s", self.id, fields)
        advice = fork_advice(self.tree.forks) if prompt.fork_reason and not self.advised else None
        if advice is not None:
            self.advised = True
            logger.warning("session %s: %s", self.id, advice)

    def add_text(
        self, prompt: TextPrompt, result: CompletionResult, reason: str | None
    ) -> list[Node]:
        """Add the text completions `result` to the session, and return their nodes. `reason`: why
        the prompt continues no earlier text, or None.
        """
        observed = self.session.observe(prompt.delta, after=prompt.parent, reason=reason)
        nodes = self._add(observed, result, "text_completion")
        for node in nodes:
            self.texts.append(node)
        return nodes

    def _add(self, prompt: Node, result: CompletionResult, kind: str) -> list[Node]:
        nodes = []
        for choice in result.choices:
            node = self.session.sample(choice.completion, result.sampling_params, after=prompt)
            self.record.add(result.prompt_ids, choice.completion)
            self.trace.append((node, kind))
            nodes.append(node)
        return nodes

    # --- verifying --------------------------------------------------------------------------------

    def start_checks(self) -> None:
        """Start to verify the sequences that are not verified yet, outside the event loop."""
        for turn in self.tree.unchecked():
            if turn not in self.checks:
                task = asyncio.get_running_loop().create_task(self._check(turn))
                self.checks[turn] = task
                # Not in `_check`: a task that is cancelled before it starts runs none of its code.
                task.add_done_callback(partial(self._forget_check, turn))

    def _forget_check(self, turn: TurnNode, _: asyncio.Task[None]) -> None:
        del self.checks[turn]

    async def check_all(self) -> None:
        """Verify the session's sequences, including sequences that are committed while this runs.
        Cancelling the caller does not cancel the verifications.
        """
        nodes = -1
        while nodes != self.session.nodes:
            while self.tree.unchecked():
                self.start_checks()
                finished, _ = await asyncio.wait(self.checks.values())
                for task in finished:
                    if task.cancelled():
                        problem = "the session was deleted while it was verified"
                        raise ApiError(409, "request_aborted", problem)
                    task.result()
            nodes = self.session.nodes
            self._record_checked(await asyncio.to_thread(self._record_check()))

    def check_all_now(self) -> None:
        """Verify the sequences not verified yet, in this thread. This blocks the event loop."""
        for turn in self.tree.unchecked():
            sequence = sequence_of(turn, self.session, self.record)
            self._check_done(turn, turn.template.verifier.check(sequence))
        self._record_checked(self._record_check()())

    async def _check(self, turn: TurnNode) -> None:
        sequence = sequence_of(turn, self.session, self.record)
        self._check_done(turn, await POOL.check(turn.template.verifier, sequence))

    def _check_done(self, turn: TurnNode, mismatch: str | None) -> None:
        """Record the result of verifying the sequence that ends with `turn`. A mismatch is counted
        once per turn.
        """
        if not turn.checked and mismatch is not None:
            self.mismatches[mismatch] += 1
        turn.checked = True

    def _record_check(self) -> Callable[[], str | None]:
        """Return a function that compares the session's present trajectories with the engine's
        answers, and returns the kind of the first mismatch, or None. It may run in a thread.
        """
        return partial(self.record.copy().check, self.session.trajectories())

    def _record_checked(self, mismatch: str | None) -> None:
        if mismatch is not None:
            self.mismatches[mismatch] = 1

    def exclude_wrong(self) -> None:
        """Exclude the whole session from training if a verification found a mismatch."""
        for kind in self.mismatches:
            if kind not in KEPT:
                self.session.exclude(f"verification: {kind}")

    async def end(self) -> None:
        """Abort the running requests and verifications, and wait until they have ended."""
        tasks: list[asyncio.Task[Any]] = [*self.pending.cancel(), *self.checks.values()]
        for check in self.checks.values():
            check.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
