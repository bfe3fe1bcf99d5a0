"""`ConversationTree`: finds the earlier turn that a request continues, and builds the exact prompt.
A turn is a sampled reply with the messages that its request added to the conversation.

Invariants:

- A request continues the longest conversation whose messages it repeats (`messages.Echo`), even if
  the client changed later messages.
- If the chat template would rewrite tokens of this conversation, or if the request sets other
  switches of the template, a new path starts, with a reason. Both paths share the nodes whose
  tokens all match.
- A request that continues no turn starts a new root.
- If the client changed what was served, the reason of the new path names the first message that
  differs (`change_at`). A request changes a served conversation if it repeats a reply of it, or all
  messages before a reply, but not all messages up to this reply.
- Only `Session` writes tokens.
- Planning changes nothing: a turn does not exist until it is committed. It never changes then. It
  holds only the messages that it added.
- A turn may keep the cursor of its prompt, so that a request that continues it renders only its own
  prompt. `ChatTemplate.start` would return an equal cursor: the one that is kept has the
  same template object (with its switches and its time), the same tools and the served messages
  before the reply. With history="scaffold", only the kept one knows earlier scaffolds, so that a
  session without it forks. If a turn continues it, its text is freed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from toolroll.endpoint.conversation.messages import (
    Digest,
    Echo,
    canonical,
    change_at,
    check_arguments,
    common_length,
    json_form,
    same_reasoning,
    with_served_ids,
)
from toolroll.endpoint.conversation.template_cache import same_switches
from toolroll.endpoint.requests.tool_list import Schemas, ToolList
from toolroll.parsers.reasoning import Tags
from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.media import Image, collapsed
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.cursor import Cursor, RewrittenError
from toolroll.rollout.template.delta import SampledText
from toolroll.rollout.template.record import AnswerRecord
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.types import IdArray, Message

EDITED = "the client changed what was served"
SWITCHES_CHANGED = "the chat template's switches changed"
NEW_ROOT = "another conversation of the same session"
_KEPT = 4
"""The number of a session's last turns that may keep their cursors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The exact prompt of a request, with its place in the session's tree.

    `input_ids` is the whole prompt: the tokens from the root to the node `parent`, then `delta`. If
    `parent` is None, `delta` is the whole prompt.
    `turn` is the turn that the prompt continues, or from which it forks. `added` are the messages
    after this turn. `digest` is the digest of the whole conversation. If the model continues an
    assistant message, `prefill` is that message's text, and `prefill_ids` are its ids, which are at
    the end of the prompt. `continues` is True if the prompt keeps all tokens of `turn`. `preserved`
    is True if it keeps tokens that the template would have rewritten, and `unshown` if it keeps
    tokens of `turn` that the template does not show. `fork_reason` is None if the prompt simply
    continues a turn or repeats an earlier prompt, or if the session had no turn when the prompt was
    planned.
    """

    template: ChatTemplate
    added: tuple[Message, ...]
    tools: ToolList
    digest: Digest
    input_ids: IdArray
    parent: Node | None
    delta: IdArray
    turn: TurnNode | None
    fork_reason: str | None = None
    continues: bool = False
    preserved: bool = False
    unshown: bool = False
    dropped: IdArray | None = None
    """The ids that were truncated from the start of a first prompt, before `input_ids`."""
    prefill: str = ""
    prefill_ids: IdArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    images: tuple[Image, ...] = ()
    """The images in `delta`. Their positions count from the root."""
    in_reasoning: bool = False
    """True if the prompt without `prefill` ends inside reasoning. False in a restored turn."""
    cursor: Cursor | None = None
    """The cursor of the whole prompt without `prefill`. None in a restored turn."""

    def cut(self, room: int) -> Prompt:
        """If the prompt is the first of a conversation and has no images, return it truncated to
        its last `room` tokens. Return any other prompt as it is.
        """
        drop = len(self.input_ids) - room
        if self.turn is not None or drop <= 0 or self.images:
            return self
        ids = self.input_ids[drop:]
        return replace(self, input_ids=ids, delta=ids, dropped=self.input_ids[:drop])


@dataclass(frozen=True, slots=True)
class _Request:
    """The parts of a `Prompt` that do not depend on its place in the tree, and the parser's tags
    for reasoning.
    """

    template: ChatTemplate
    added: list[Message]
    tools: ToolList
    digest: Digest
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
        return Prompt(
            template=self.template,
            added=tuple(self.added),
            tools=self.tools,
            digest=self.digest,
            input_ids=ids,
            parent=parent,
            delta=delta,
            turn=turn,
            in_reasoning=cursor.opens_reasoning(self.reasoning),
            cursor=cursor,
            **more,
        )


class ConversationTree:
    """The turns of one session. Their tokens are in `session`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.forks: list[str] = []
        self._turns: dict[Digest, list[TurnNode]] = {}
        # the last turn with a reply, the last one with a conversation before its reply, and the
        # last one that follows the turn of a node
        self._by_reply: dict[Digest, TurnNode] = {}
        self._by_prompt: dict[Digest, TurnNode] = {}
        self._next: dict[int, TurnNode] = {}
        self._last: deque[TurnNode] = deque()  # only these turns may have a cursor
        # The first schema of each tool. All digests are made under it, even if it changes later.
        self._schemas: Schemas = {}

    # --- planning ---------------------------------------------------------------------------------

    def plan(
        self,
        messages: list[Message],
        tools: ToolList,
        template: ChatTemplate,
        reasoning: Tags | None = None,
    ) -> Prompt:
        """Return the prompt of a request. Raise `TemplateError` or `ApiError` if the template
        cannot render the conversation. `reasoning`: the parser's tags for reasoning.
        """
        schemas = self.schemas_with(tools)
        echo = Echo(schemas=schemas)
        digests = [echo.add(message) for message in messages]
        turn, length = self._longest(messages, digests)
        check_arguments(messages[length:])
        history = turn.messages() if turn is not None else []
        new = with_served_ids(messages[length:], messages[:length], history)
        request = _Request(template, new, tools, echo.digest, reasoning)
        edited = self._edited(turn, length, messages, digests, schemas)
        if turn is None:
            cursor = template.start(new, tools)
            ids, images = _expanded(template, cursor.prompt(), new)
            reason = edited or (NEW_ROOT if self._turns else None)
            return request.at(None, None, ids, ids, cursor, fork_reason=reason, images=images)
        reason, restart = SWITCHES_CHANGED, None
        if same_switches(template, turn.template):
            try:
                return self._continued(request, turn, history, edited)
            except RewrittenError as error:
                reason, restart = edited or error.reason, error.restart
            except HistoryRewrittenError as error:
                reason = edited or error.reason
        cursor = restart or template.start([*history, *new], tools)
        return self._forked(request, turn, cursor, reason)

    def schemas_with(self, tools: ToolList) -> Schemas:
        """Return the schemas of the session's tools and of new tools in `tools`."""
        return {**tools.schemas, **self._schemas}

    def fit(self, messages: Sequence[Message], digests: Sequence[Digest]) -> tuple[int, int]:
        """Return the number of messages in the longest conversation of this session that a request
        with `messages` repeats, and how many of them it repeats with their call ids, reasoning and
        spacing. Return (0, 0) if it repeats none. `digests`: see `_longest`.
        """
        turn, length = self._longest(messages, digests)
        if turn is None:
            return 0, 0
        return length, sum(map(operator.eq, map(_parts, turn.messages()), map(_parts, messages)))

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
        reply is most like the one that the client repeats: a turn with the same arguments of calls,
        defaults included, before one that is the same otherwise, before one with the same call ids.
        Of equal ones, return the first. Ignore turns whose reasoning the client changed. Return
        None if no turn is left.
        """
        fitting = [turn for turn in turns if turn.keeps_reasoning(messages, length)]
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        repeated = _parts(messages[length - 1])

        def likeness(turn: TurnNode) -> tuple[bool, bool, bool]:
            arguments, text, ids = map(operator.eq, _parts(turn.reply), repeated)
            return arguments, text and ids, ids

        return max(fitting, key=likeness)

    def _edited(
        self,
        turn: TurnNode | None,
        length: int,
        messages: Sequence[Message],
        digests: Sequence[Digest],
        schemas: Schemas,
    ) -> str | None:
        """Return how the request changes what was served after its first `length` messages, the
        conversation of `turn`. Return None if it changes nothing. `digests`: see `_longest`.
        """
        later = range(len(messages) - 1, length - 1, -1)  # the last message first
        replies = (
            Echo(schemas=schemas).add(messages[index])
            for index in later
            if messages[index]["role"] == "assistant"
        )
        prompts = (digests[index - 1] for index in later if index)
        turns = (
            next(filter(None, map(self._by_reply.get, replies)), None),
            next(filter(None, map(self._by_prompt.get, prompts)), None),
            self._next.get(turn.node.index) if turn is not None else None,
        )
        histories = [earlier.messages() for earlier in turns if earlier is not None]
        if not histories:
            return None
        lengths = [common_length(history, messages, schemas) for history in histories]
        index = max(lengths)
        history = histories[lengths.index(index)]
        if index >= min(len(history), len(messages)):
            return None
        return f"{EDITED}: {change_at(index, history, messages, schemas)}"

    def _continued(
        self, request: _Request, turn: TurnNode, history: list[Message], edited: str | None
    ) -> Prompt:
        """Return the prompt that follows `turn` and keeps its tokens. `edited`: see `_edited`."""
        changed = request.tools if request.tools.text != turn.tools.text else None
        cursor = turn.cursor
        if cursor is None or request.template is not turn.template:
            cursor = request.template.start(history[:-1], turn.tools)
        delta, after = cursor.after(turn.sampled, [history[-1], *request.added], changed)
        delta, images = _expanded(request.template, delta, request.added, turn.node.stop)
        ids = np.concatenate([self.session.path_ids(turn.node), delta])
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
            unshown=after.unshown,
            images=images,
        )

    def _forked(self, request: _Request, turn: TurnNode, cursor: Cursor, reason: str) -> Prompt:
        session, node = self.session, turn.node
        keep = collapsed(session.path_ids(node), session.path_images(node))
        messages = [*turn.messages(), *request.added]
        ids, images = _expanded(request.template, cursor.prompt(keep=keep), messages)
        shared = session.shared_prefix(ids, node, images)
        stop = shared.stop if shared is not None else 0
        new = tuple(image for image in images if image.position >= stop)
        return request.at(shared, turn, ids, ids[stop:], cursor, fork_reason=reason, images=new)

    # --- verifying --------------------------------------------------------------------------------

    def unchecked(self) -> list[TurnNode]:
        """Return the last turn of each sequence that is not verified yet."""
        turns = [turn for same in self._turns.values() for turn in same]
        continued = {id(turn.parent) for turn in turns if turn.continues}
        return [turn for turn in turns if not turn.checked and id(turn) not in continued]

    def tool_calls(self) -> int:
        """Return the number of calls in all replies."""
        replies = (turn.reply for turns in self._turns.values() for turn in turns)
        return sum(len(reply.get("tool_calls") or ()) for reply in replies)

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
        node = self.session.observe(
            prompt.delta, after=prompt.parent, reason=reason, images=prompt.images
        )
        if reason is not None and self.session.nodes > before:
            self.forks.append(reason)
        return node

    def commit(self, prompt: Prompt, node: Node, parsed: ParsedTurn) -> TurnNode:
        """Add the turn whose reply was sampled as `node`."""
        schemas = self._schemas = self.schemas_with(prompt.tools)
        digest = Echo(prompt.digest, schemas).add(parsed.message)
        turn = TurnNode(
            parent=prompt.turn,
            added=prompt.added,
            reply=parsed.message,
            digest=digest,
            node=node,
            sampled=parsed.sampled,
            tools=prompt.tools,
            template=prompt.template,
            continues=prompt.continues,
            preserved=prompt.preserved,
            dropped=prompt.dropped,
            prefill=prompt.prefill,
            prefill_size=len(prompt.prefill_ids),
            cursor=prompt.cursor,
        )
        self._keep_cursor(turn)
        self._turns.setdefault(digest, []).append(turn)
        self._by_reply[Echo(schemas=schemas).add(parsed.message)] = turn
        self._by_prompt[prompt.digest] = turn
        if prompt.turn is not None:
            self._next[prompt.turn.node.index] = turn
            if prompt.continues and prompt.turn.cursor is not None:
                prompt.turn.cursor.free()  # the next request continues the new turn
        return turn

    def _keep_cursor(self, turn: TurnNode) -> None:
        """Keep the cursor of the new `turn`. Only the last `_KEPT` turns keep theirs."""
        self._last.append(turn)
        if len(self._last) > _KEPT:
            self._last.popleft().cursor = None


def _expanded(
    template: ChatTemplate, ids: IdArray, messages: Sequence[Message], start: int = 0
) -> tuple[IdArray, tuple[Image, ...]]:
    """Return the ids of `messages`, which begin at `start`, with all tokens of their images, and
    the images.
    """
    if template.images is None:
        return ids, ()
    ids, images = template.images.expand(ids, messages)
    return ids, tuple(replace(image, position=start + image.position) for image in images)


def _parts(message: Message) -> tuple[bytes, tuple[Any, ...], list[str]]:
    """Return the arguments of the calls in `message`, its texts, and the ids of its calls."""
    calls = message.get("tool_calls") or ()
    arguments = [canonical(call["function"].get("arguments") or "{}") for call in calls]
    texts = message.get("content") or "", message.get("reasoning_content")
    return json_form(arguments), texts, [call["id"] for call in calls]


# --- turns ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class TurnNode:
    """One turn: the messages that its request added, the reply and its node in the session's tree,
    and the tools and the template of its prompt.
    """

    parent: TurnNode | None
    added: tuple[Message, ...]
    reply: Message
    digest: Digest
    node: Node
    sampled: SampledText
    tools: ToolList
    template: ChatTemplate
    continues: bool = False
    """True if its tokens directly follow the tokens of `parent`."""
    preserved: bool = False
    """True if its prompt keeps tokens that the template would have rewritten."""
    dropped: IdArray | None = None
    """The ids that were removed from the start of its prompt. The model did not get them."""
    prefill: str = ""
    prefill_size: int = 0
    """The start of the reply, if the client gave it to the model: its text and its number of
    tokens. These tokens are before `node`, in the prompt.
    """
    cursor: Cursor | None = None
    """The cursor of its whole prompt, if it is kept for the requests that continue it."""
    checked: bool = False
    """True if the sequence that ends with this turn was verified."""

    def messages(self) -> list[Message]:
        """Return the conversation up to and including the reply, as it was served."""
        turns: list[TurnNode] = []
        turn: TurnNode | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return [message for step in reversed(turns) for message in (*step.added, step.reply)]

    def keeps_reasoning(self, messages: Sequence[Message], length: int) -> bool:
        """Return True if the first `length` of `messages` repeat the reasoning of this turn's
        conversation unchanged, or omit it. Return False if they change it.
        """
        turn: TurnNode | None = self
        while turn is not None:
            start = length - len(turn.added) - 1
            if not all(map(same_reasoning, messages[start:length], (*turn.added, turn.reply))):
                return False
            turn, length = turn.parent, start
        return True


def sequence_of(last: TurnNode, session: Session, record: AnswerRecord) -> ServedSequence:
    """Return the token sequence that ends with `last`, in the form that `Verifier.check` needs."""
    chain = [last]
    while chain[-1].continues and chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    messages = last.messages()
    end = len(messages)
    spans: list[TurnSpan] = []
    # A first prompt that was truncated is verified together with the ids that it lost.
    dropped = chain[-1].dropped
    ids = session.path_ids(last.node)
    shift = 0 if dropped is None else len(dropped)
    for turn in chain:
        stopped = turn.sampled.stop is not None
        start, stop = turn.node.start + shift, turn.node.stop + shift
        begin = start - turn.prefill_size
        spans.append(TurnSpan(begin, stop, end - 1, stopped, turn.prefill, start))
        end -= len(turn.added) + 1
    return ServedSequence(
        np.concatenate([dropped, ids]) if dropped is not None else ids,
        tuple(reversed(spans)),
        messages,
        list(last.tools),
        forked=chain[-1].parent is not None,
        preserved=any(turn.preserved for turn in chain),
        record=record,
        dropped=shift,
        images=session.path_images(last.node),
    )
