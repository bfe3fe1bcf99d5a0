"""`ConversationTree`: which served turn a request goes on from, and the exact tokens of its prompt.

Invariants: a request extends the longest turn whose messages it repeats (`messages.Echo`) and whose tokens the chat template keeps,
whatever the client changed behind it; else the path forks, with the reason, and shares the whole nodes that stay; what belongs to no
turn is a new root. Only `Session` writes tokens; a turn holds only the messages that it added. Planning changes nothing: a turn
exists once it is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ReferenceType

import numpy as np
import orjson

from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.node import Node
from toolroll.rollout.reply import Reading
from toolroll.rollout.server.messages import Digest, Echo, same_reasoning, with_served_ids
from toolroll.rollout.server.turns import Served
from toolroll.rollout.server.works import Work
from toolroll.rollout.session import Session
from toolroll.rollout.template.chat_template import ChatTemplate, Delta, as_ids
from toolroll.rollout.template.derive import Sampled
from toolroll.rollout.template.features import History
from toolroll.rollout.types import IdArray, Message, Tool

EDITED = "the client changed what was served"
TOOLS_CHANGED = "the tool list changed, and the template shows it in what was already served"
SWITCHES_CHANGED = "the chat template's switches changed"
NEW_ROOT = "another conversation of the same session"


@dataclass(slots=True, eq=False)
class ServedTurn:
    """One served turn: the messages that its prompt added, the reply, its node, and under what it was served."""

    parent: ServedTurn | None
    added: tuple[Message, ...]
    reply: Message
    digest: Digest
    node: Node
    sampled: Sampled
    tools_key: bytes
    template: ChatTemplate
    history: History
    """Of the conversation up to and with the reply."""
    source: ReferenceType[Work[Served]] | None = None
    """The request that it came from, as long as that is kept for a retry: a turn does not keep it alive."""

    def answered(self) -> Work[Served] | None:
        """The request that it came from, if that is still kept; it is asked for once, by who goes on from the answer."""
        source, self.source = self.source, None
        return source() if source is not None else None

    @property
    def messages(self) -> list[Message]:
        """The conversation up to and with the reply, as it was served."""
        turns: list[ServedTurn] = []
        turn: ServedTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return [message for step in reversed(turns) for message in (*step.added, step.reply)]


@dataclass(frozen=True, slots=True)
class Check:
    """What a learned frame made, to be derived anew: the arguments of `ChatTemplate.check`; `due` under verify="sample"."""

    before: list[Message]
    new: list[Message]
    tools: list[Tool]
    sampled: Sampled
    input_ids: IdArray
    due: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """A planned prompt: `input_ids` whole; `parent` the node that it shares, `delta` what comes behind. `messages` and `tools` as they
    are served; `digest` of the messages. `fork_reason` where it is no plain continuation."""

    template: ChatTemplate
    messages: list[Message]
    added: tuple[Message, ...]
    tools: list[Tool]
    tools_key: bytes
    digest: Digest
    input_ids: IdArray
    parent: Node | None
    delta: IdArray
    turn: ServedTurn | None
    fork_reason: str | None = None
    check: Check | None = None
    preserved: bool = False


class ConversationTree:
    """The turns served in one session, over its token tree."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._turns: dict[Digest, list[ServedTurn]] = {}
        self.forks: list[str] = []
        self._tools_keys: dict[bytes, bytes] = {}

    # --- planning ------------------------------------------------------------------------------------------------------

    def plan(self, messages: list[Message], tools: list[Tool], template: ChatTemplate) -> Prompt:
        """The prompt of a request. Raises `TemplateError` where the template refuses the conversation."""
        turn, length, digest = self._longest(messages)
        tools_key = self._one_of(orjson.dumps(tools))
        if turn is None:
            return self._root(messages, tools, tools_key, digest, template)
        served = turn.messages
        new = with_served_ids(messages[length:], messages[:length], served)
        whole = [*served, *new]
        edited = EDITED if any(message["role"] == "assistant" for message in new) else None
        reason = self._why_fork(turn, tools, tools_key, template)
        if reason is None:
            try:
                return self._continued(turn, served, new, tools, tools_key, digest, template, edited)
            except HistoryRewrittenError as error:
                reason = edited or error.reason
        return self._forked(turn, whole, tuple(new), tools, tools_key, digest, template, reason)

    def _one_of(self, tools_key: bytes) -> bytes:
        """The object that stands for these tools already: each turn keeps one, and lists of tools are long."""
        return self._tools_keys.setdefault(tools_key, tools_key)

    def _longest(self, messages: Sequence[Message]) -> tuple[ServedTurn | None, int, Digest]:
        """The longest turn that `messages` repeat, how many of them it covers, and the digest of all of them."""
        echo = Echo()
        found: list[tuple[int, Digest]] = []
        for index, message in enumerate(messages):
            digest = echo.add(message)
            if message["role"] == "assistant" and digest in self._turns:
                found.append((index + 1, digest))
        for length, digest in reversed(found):
            turn = self._choose(self._turns[digest], messages[:length])
            if turn is not None:
                return turn, length, echo.digest
        return None, 0, echo.digest

    def _choose(self, turns: Sequence[ServedTurn], given: Sequence[Message]) -> ServedTurn | None:
        """Of turns that say the same (siblings), the one whose call ids the client repeats, else the first; none where the client
        changed a thought."""
        kept = [turn for turn in turns if all(map(same_reasoning, given, turn.messages))]
        if len(kept) <= 1:
            return kept[0] if kept else None
        exact = (turn for turn in kept if _said(turn.reply) == _said(given[-1]))
        same_ids = (turn for turn in kept if _call_ids(turn.reply) == _call_ids(given[-1]))
        return next(exact, None) or next(same_ids, None) or kept[0]

    def _why_fork(self, turn: ServedTurn, tools: list[Tool], tools_key: bytes, template: ChatTemplate) -> str | None:
        if template is not turn.template:
            return SWITCHES_CHANGED
        if tools_key != turn.tools_key:
            before = turn.messages[:-1]
            render = template.renderer.render
            if render(before, orjson.loads(turn.tools_key), generate=True) != render(before, tools, generate=True):
                return TOOLS_CHANGED
        return None

    def _root(self, messages: list[Message], tools: list[Tool], tools_key: bytes, digest: Digest, template: ChatTemplate) -> Prompt:
        ids = as_ids(template.prompt(messages, tools))
        reason = NEW_ROOT if self._turns else None
        return Prompt(template, messages, tuple(messages), tools, tools_key, digest, ids, None, ids, None, reason)

    def _continued(
        self,
        turn: ServedTurn,
        served: list[Message],
        new: list[Message],
        tools: list[Tool],
        tools_key: bytes,
        digest: Digest,
        template: ChatTemplate,
        edited: str | None,
    ) -> Prompt:
        """Behind `turn`, whose tokens stay: also where the client changed what was served behind it (`edited`)."""
        delta: Delta = template.delta_after(
            turn.history.key, served, new, tools=tools, sampled=turn.sampled, sampled_ids=turn.node.ids, tools_key=tools_key
        )
        ids = np.concatenate([self.session.path_ids(turn.node), delta.input_ids])
        check = Check(served, new, tools, turn.sampled, delta.input_ids, delta.check_due) if delta.framed else None
        return Prompt(
            template, [*served, *new], tuple(new), tools, tools_key, digest, ids, turn.node, delta.input_ids, turn,
            edited if turn.node.children else None, check=check, preserved=delta.preserved is not None,
        )  # fmt: skip

    def _forked(
        self,
        turn: ServedTurn,
        whole: list[Message],
        new: tuple[Message, ...],
        tools: list[Tool],
        tools_key: bytes,
        digest: Digest,
        template: ChatTemplate,
        reason: str,
    ) -> Prompt:
        ids = as_ids(template.fork_prompt(self.session.path_ids(turn.node), whole, tools))
        shared = self.session.shared_prefix(ids, turn.node)
        delta = ids[shared.stop if shared is not None else 0 :]
        return Prompt(template, whole, new, tools, tools_key, digest, ids, shared, delta, turn, reason)

    # --- committing ----------------------------------------------------------------------------------------------------

    def observe(self, prompt: Prompt) -> Node:
        """Write the prompt's own tokens; the same prompt twice is one node."""
        before = self.session.nodes
        node = self.session.grow(prompt.parent, prompt.delta, reason=prompt.fork_reason)
        if prompt.fork_reason is not None and self.session.nodes > before:
            self.forks.append(prompt.fork_reason)
        return node

    def commit(self, prompt: Prompt, node: Node, reading: Reading) -> ServedTurn:
        """Enter the turn that was sampled as `node`."""
        echo = Echo(prompt.digest)
        digest = echo.add(reading.message)
        turn = ServedTurn(
            prompt.turn,
            prompt.added,
            reading.message,
            digest,
            node,
            reading.sampled,
            prompt.tools_key,
            prompt.template,
            _history(prompt, reading.message),
        )
        self._turns.setdefault(digest, []).append(turn)
        return turn


def _history(prompt: Prompt, reply: Message) -> History:
    """What the template can see of the conversation that ends with `reply`."""
    if prompt.turn is not None and prompt.turn.template is prompt.template:
        history = prompt.turn.history.copy()
        history.extend(prompt.added)
    else:
        history = History(prompt.template.features)
        history.extend(prompt.messages)
    history.add(reply)
    return history


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or ()]


def _said(message: Message) -> tuple[str, str | None, list[str]]:
    return (message.get("content") or "", message.get("reasoning_content"), _call_ids(message))
