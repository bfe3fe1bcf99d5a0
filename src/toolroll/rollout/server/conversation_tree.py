"""`ConversationTree`: finds the earlier turn that a request continues, and builds the exact prompt.
A turn is a sampled reply with the messages that its request added to the conversation.

Invariants:

- A request continues the longest conversation whose messages it repeats (`messages.Echo`), even if
  the client changed later messages.
- If the chat template would rewrite tokens of this conversation, or if the request sets other
  switches of the template, a new path starts, with a reason. Both paths share the nodes whose
  tokens all match.
- A request that continues no turn starts a new root. If the session has turns, the root's reason
  says whether the client changed what was served. This is so if the request repeats a turn's reply,
  or if it repeats all messages before a turn's reply and then has another assistant message.
- Only `Session` writes tokens.
- Planning changes nothing: a turn does not exist until it is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from toolroll.parsers.reasoning import Tags
from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.server.messages import Digest, Echo, check_arguments, with_served_ids
from toolroll.rollout.server.result import joined_ids
from toolroll.rollout.server.template_cache import same_switches
from toolroll.rollout.server.turn import TurnNode
from toolroll.rollout.session.node import Node
from toolroll.rollout.session.session import Session
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.cursor import Cursor
from toolroll.rollout.types import IdArray, Message, Tool

EDITED = "the client changed what was served"
SWITCHES_CHANGED = "the chat template's switches changed"
NEW_ROOT = "another conversation of the same session"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The exact prompt of a request, with its place in the session's tree.

    `input_ids` is the whole prompt: the tokens from the root to the node `parent`, then `delta`. If
    `parent` is None, `delta` is the whole prompt.
    `turn` is the turn that the prompt continues, or from which it forks. `added` are the messages
    after this turn. `digest` is the digest of the whole conversation. If the model continues an
    assistant message, `prefill` is that message's text, and `prefill_ids` are its ids, which are at
    the end of the prompt. `continues` is True if the prompt keeps all tokens of `turn`. `preserved`
    is True if it keeps tokens that the template would have rewritten. `fork_reason` is None if the
    prompt simply continues a turn, or if the session had no turn when the prompt was planned.
    """

    template: ChatTemplate
    added: tuple[Message, ...]
    tools_key: bytes
    digest: Digest
    input_ids: IdArray
    parent: Node | None
    delta: IdArray
    turn: TurnNode | None
    fork_reason: str | None = None
    continues: bool = False
    preserved: bool = False
    dropped: IdArray | None = None
    """The ids that were truncated from the start of a first prompt, before `input_ids`."""
    prefill: str = ""
    prefill_ids: IdArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    in_reasoning: bool = False
    """True if the prompt without `prefill` ends inside reasoning. False in a restored turn."""

    def cut(self, room: int) -> Prompt:
        """If the prompt is the first of a conversation, return it truncated to its last `room`
        tokens. Return any other prompt as it is.
        """
        drop = len(self.input_ids) - room
        if self.turn is not None or drop <= 0:
            return self
        ids = self.input_ids[drop:]
        return replace(self, input_ids=ids, delta=ids, dropped=self.input_ids[:drop])

    def ids_json(self, before: bytes | None) -> bytes:
        """Return `input_ids` as JSON text without brackets.

        `before` is the stored JSON text of the prompt of `turn`, or None if it was dropped. If this
        prompt continues `turn`, only the new ids are converted.
        """
        if before is None or self.turn is None or self.parent != self.turn.node:
            return joined_ids(self.input_ids)
        return joined_ids(before, self.turn.node.ids, self.delta)


@dataclass(frozen=True, slots=True)
class _Request:
    """The parts of a `Prompt` that do not depend on its place in the tree, the list `tools`, and
    the parser's tags for reasoning.
    """

    template: ChatTemplate
    added: list[Message]
    tools_key: bytes
    digest: Digest
    tools: list[Tool]
    reasoning: Tags | None

    def at(
        self,
        parent: Node | None,
        turn: TurnNode | None,
        ids: IdArray,
        delta: IdArray,
        cursor: Cursor,
        **more: Any,
    ) -> Prompt:
        """Return the prompt `ids` of `cursor`, which continues or forks from `turn`."""
        own = self.template, tuple(self.added), self.tools_key, self.digest
        in_reasoning = cursor.opens_reasoning(self.reasoning)
        return Prompt(*own, ids, parent, delta, turn, in_reasoning=in_reasoning, **more)


class ConversationTree:
    """The turns of one session. Their tokens are in `session`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._turns: dict[Digest, list[TurnNode]] = {}
        self._replies: set[Digest] = set()
        self._prompts: set[Digest] = set()
        self.forks: list[str] = []
        self._tools_keys: dict[bytes, bytes] = {}

    # --- planning ---------------------------------------------------------------------------------

    def plan(
        self,
        messages: list[Message],
        tools: list[Tool],
        template: ChatTemplate,
        reasoning: Tags | None = None,
    ) -> Prompt:
        """Return the prompt of a request. Raise `TemplateError` or `ApiError` if the template
        cannot render the conversation. `reasoning`: the parser's tags for reasoning.
        """
        echo = Echo()
        digests = [echo.add(message) for message in messages]
        turn, length = self._longest(messages, digests)
        tools_key = orjson.dumps(tools)
        check_arguments(messages[length:])
        served = turn.messages() if turn is not None else []
        new = with_served_ids(messages[length:], messages[:length], served)
        request = _Request(template, new, tools_key, echo.digest, tools, reasoning)
        if turn is None:
            return self._root(request, digests)
        edited = EDITED if any(message["role"] == "assistant" for message in new) else None
        reason = SWITCHES_CHANGED
        if same_switches(template, turn.template):
            try:
                return self._continued(request, turn, served, edited)
            except HistoryRewrittenError as error:
                reason = edited or error.reason
        return self._forked(request, turn, served, reason)

    def _longest(
        self, messages: Sequence[Message], digests: Sequence[Digest]
    ) -> tuple[TurnNode | None, int]:
        """Return the turn that ends the longest conversation that the request repeats, and the
        number of messages in this conversation. Return None and 0 if the request repeats no turn.
        `digests[i]` is the digest of `messages[: i + 1]`.
        """
        for length in range(len(messages), 0, -1):
            turn = self._choose(self._turns.get(digests[length - 1], ()), messages, length)
            if turn is not None:
                return turn, length
        return None, 0

    def _choose(
        self, turns: Sequence[TurnNode], messages: Sequence[Message], length: int
    ) -> TurnNode | None:
        """Choose among `turns`, whose conversations have the same digest. Return the turn whose
        reply the client repeats exactly, or else the first one with the client's call ids, or else
        the first. Ignore turns whose reasoning the client changed. Return None if no turn is left.
        """
        kept = [turn for turn in turns if turn.keeps_reasoning(messages, length)]
        if len(kept) <= 1:
            return kept[0] if kept else None
        given = messages[length - 1]
        exact = (turn for turn in kept if _parts(turn.reply) == _parts(given))
        same_ids = (turn for turn in kept if _call_ids(turn.reply) == _call_ids(given))
        return next(exact, None) or next(same_ids, None) or kept[0]

    def _root(self, request: _Request, digests: Sequence[Digest]) -> Prompt:
        cursor = request.template.start(request.added, request.tools)
        ids, reason = cursor.prompt(), None
        if self._turns:
            messages = request.added
            edited = self._repeats_a_reply(messages) or self._replaces_a_reply(messages, digests)
            reason = EDITED if edited else NEW_ROOT
        return request.at(None, None, ids, ids, cursor, fork_reason=reason)

    def _repeats_a_reply(self, messages: Sequence[Message]) -> bool:
        replies = (Echo().add(m) for m in messages if m["role"] == "assistant")
        return any(reply in self._replies for reply in replies)

    def _replaces_a_reply(self, messages: Sequence[Message], digests: Sequence[Digest]) -> bool:
        """Return True if an assistant message follows messages to which a turn replied. `digests`:
        see `_longest`.
        """
        return any(
            message["role"] == "assistant" and before in self._prompts
            for before, message in zip(digests, messages[1:], strict=False)
        )

    def _continued(
        self, request: _Request, turn: TurnNode, served: list[Message], edited: str | None
    ) -> Prompt:
        """Return the prompt that follows `turn` and keeps its tokens. `edited`: the fork reason if
        the client changed messages after `turn`, else None.
        """
        tools = request.tools
        changed = request.tools_key != turn.tools_key
        before = orjson.loads(turn.tools_key) if changed else tools
        cursor = request.template.start(served[:-1], before)
        delta, after = cursor.after(
            turn.sampled, [served[-1], *request.added], tools if changed else None
        )
        ids = turn.ids_with(delta, self.session)
        reason, preserved = edited if turn.node.children else None, after.preserved is not None
        return request.at(
            turn.node,
            turn,
            ids,
            delta,
            after,
            fork_reason=reason,
            continues=True,
            preserved=preserved,
        )

    def _forked(
        self, request: _Request, turn: TurnNode, served: list[Message], reason: str
    ) -> Prompt:
        kept = self.session.path_ids(turn.node)
        cursor = request.template.start([*served, *request.added], request.tools)
        ids = cursor.prompt(keep=kept)
        shared = self.session.shared_prefix(ids, turn.node)
        delta = ids[shared.stop if shared is not None else 0 :]
        return request.at(shared, turn, ids, delta, cursor, fork_reason=reason)

    # --- verifying --------------------------------------------------------------------------------

    def unchecked(self) -> list[TurnNode]:
        """Return the last turn of each sequence that is not verified yet."""
        turns = [turn for same in self._turns.values() for turn in same]
        continued = {id(turn.parent) for turn in turns if turn.continues}
        return [turn for turn in turns if not turn.checked and id(turn) not in continued]

    def last_turn(self) -> TurnNode | None:
        """Return the turn that was committed last."""
        turns = (turn for same in self._turns.values() for turn in same)
        return max(turns, key=lambda turn: turn.node.index, default=None)

    # --- committing -------------------------------------------------------------------------------

    def observe(self, prompt: Prompt) -> Node:
        """Add the prompt's tokens to the tree. Identical prompts share one node."""
        before, reason = self.session.nodes, prompt.fork_reason
        if before and prompt.turn is None and reason is None:
            reason = NEW_ROOT  # another first request was answered after this prompt was planned
        node = self.session.observe(prompt.delta, after=prompt.parent, reason=reason)
        if reason is not None and self.session.nodes > before:
            self.forks.append(reason)
        return node

    def commit(self, prompt: Prompt, node: Node, reading: ParsedTurn) -> TurnNode:
        """Add the turn whose reply was sampled as `node`."""
        # Tool lists are long, so all turns with identical tools share one key.
        tools_key = self._tools_keys.setdefault(prompt.tools_key, prompt.tools_key)
        echo = Echo(prompt.digest)
        digest = echo.add(reading.message)
        turn = TurnNode(
            prompt.turn,
            prompt.added,
            reading.message,
            digest,
            node,
            reading.sampled,
            tools_key,
            prompt.template,
            prompt.continues,
            prompt.preserved,
            prompt.dropped,
            prefill=prompt.prefill,
            prefill_size=len(prompt.prefill_ids),
        )
        self._turns.setdefault(digest, []).append(turn)
        self._replies.add(Echo().add(reading.message))
        self._prompts.add(prompt.digest)
        return turn


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or ()]


def _parts(message: Message) -> tuple[str, str | None, list[str]]:
    return (message.get("content") or "", message.get("reasoning_content"), _call_ids(message))
