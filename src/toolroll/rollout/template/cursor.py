"""`Cursor`: a conversation that waits for the model's next turn, and the exact ids of its prompt.

Invariants: a cursor never changes. Its text is what `Renderer.render` returns for the same messages
and tools. It holds only the prepared messages, the head (`Head`), and the text of its own prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from toolroll.parsers.reasoning import Tags
from toolroll.parsers.types import Span
from toolroll.rollout.errors import HistoryRewrittenError, TemplateError, capped
from toolroll.rollout.template.bodies import BodyMasker, Spelled
from toolroll.rollout.template.delta import (
    Continuation,
    DeltaRenderer,
    RenderedDelta,
    SampledText,
    ServedPrompt,
)
from toolroll.rollout.template.encode import Encoder, as_ids
from toolroll.rollout.template.render import Head, Renderer, plain_content
from toolroll.rollout.template.snapshot import SharedTools, texts_of
from toolroll.rollout.types import IdArray, Message, Tool

KEPT = frozenset(("preserved", "unshown"))
"""The token mismatches that exclude nothing from training (see `Cursor`)."""
TOOLS_CHANGED = "the tool list changed, and the prompt that was already served contains the tools"


class Position(NamedTuple):
    """A place in the render of a conversation: its `offset`, and the index (`message`) of the first
    message whose render starts there or later.
    """

    offset: int
    message: int


START = Position(0, 0)
"""The start of the render. The render of the tools follows it."""


@dataclass(frozen=True, slots=True)
class TemplateParts:
    """The parts that all cursors of one chat template share.

    `fork`: raise `HistoryRewrittenError` if the template rewrites the prompt or the sampled turn.
    `keep_scaffold`: this does not include scaffolds that the template removes later.
    """

    renderer: Renderer
    encoder: Encoder
    deltas: DeltaRenderer
    bodies: BodyMasker
    fork: bool
    keep_scaffold: bool = False

    def body_spans(
        self,
        text: str,
        messages: Sequence[Message],
        head: Head,
        spelled: Spelled,
        *,
        since: Position = START,
        generate: bool = True,
    ) -> list[Span]:
        """Return the body spans of the render `text`: where it contains text that comes from a
        message or a tool and spells a control token. Only spans from `since` on are returned,
        relative to `since.offset`. Text of the tools is searched only from `START`.

        `head` is the head of the conversation, and `spelled` is what it spells
        (`BodyMasker.spelled`).

        Raises `TemplateError` if such text cannot be distinguished from the template's own tokens.
        """
        start = since.offset
        marked_since = (messages[i] for i in spelled.messages if i >= since.message)
        strings = set(texts_of(list(marked_since)))
        if since == START and spelled.tools:
            strings |= head.shared_tools.strings
        if not self.bodies.may_spell(text[start:], spelled, strings):
            return []
        # Earlier messages are masked too, because a template may repeat their text.
        masked, tools, originals = self.bodies.mask(messages, head.shared_tools, spelled, text)
        if not originals:
            return []
        masked_head = replace(self.renderer.head(masked, tools), texts=head.texts)
        marked = self.renderer.render_prepared(masked, masked_head, generate=generate)
        spans = self.bodies.locate(marked, originals, text, start=start)
        return [(begin - start, end - start) for begin, end in spans if begin >= start]


class Cursor:
    """A conversation that waits for the model's turn, and its prompt.

    Create a cursor with `ChatTemplate.start`; `after` returns the next one.

    With history="preserve", the step to this cursor may have kept tokens that the template would
    have rewritten. `preserved` describes this rewrite, or is None if there was none. `unshown`: the
    template rewrites nothing, but does not show all sampled text of the last turn at its place.

    Example::

        cursor = template.start([{"role": "user", "content": "What is 1 + 1?"}], tools)
        prompt = cursor.prompt()  # ids
        # ... the engine samples `output_ids`; `turn` is their message, `result` a tool result
        delta, cursor = cursor.after(template.sampled(output_ids), [turn, result])
        # the next prompt is prompt + output_ids + delta
    """

    def __init__(
        self,
        parts: TemplateParts,
        messages: list[Message],
        head: Head,
        spelled: Spelled,
        *,
        delta: RenderedDelta | None = None,
        turns: tuple[int, ...] = (),
    ) -> None:
        self._parts = parts
        self._messages = messages
        self._head = head
        self._spelled = spelled
        self.preserved = None if delta is None else delta.rewritten
        self.unshown = delta is not None and delta.unshown
        # Where the text after the last sampled turn starts.
        self._start = 0 if delta is None else delta.cut
        self._turns = turns  # where sampled turns start that still have their scaffold
        if delta is not None:
            self.text = delta.whole

    @cached_property
    def text(self) -> str:
        """The render of the conversation, including the generation prompt.

        Raises `TemplateError` if the template refuses the conversation.
        """
        return self._parts.renderer.render_prepared(self._messages, self._head, generate=True)

    def free(self) -> None:
        """Free `text`. If it is needed again, it is rendered again."""
        self.__dict__.pop("text", None)

    def opens_reasoning(self, reasoning: Tags | None) -> bool:
        """Return True if the prompt ends inside reasoning, so that the reply begins with reasoning.

        Only a tag that the template wrote after the last message counts. A tag that a message
        contains does not. `reasoning`: the tags, or None if the parser's format has no tags.
        """
        unclosed = reasoning.unclosed(self.text, self._start) if reasoning is not None else None
        if unclosed is None:
            return False
        begin, end = unclosed
        tag, last = self.text[begin:end], texts_of(self._messages[-1:])
        if not self.text[end:].strip() and not any(text.rstrip().endswith(tag) for text in last):
            return True
        # The tag may be part of a message, or text of the template may follow it.
        renderer = self._parts.renderer
        alone = renderer.render_prepared(self._messages, self._head, generate=False)
        return not alone.startswith(self.text[:end])

    def prompt(self, *, keep: IdArray | None = None) -> IdArray:
        """Return the ids of the whole prompt.

        `keep`: the ids of an earlier prompt. They are reused up to the last control token before
        the first difference from this prompt's text, because ordinary tokens never merge across a
        control token. Only the rest of the prompt is encoded.
        """
        text, encoder = self.text, self._parts.encoder
        bodies = self._parts.body_spans(text, self._messages, self._head, self._spelled)
        if keep is None:
            return as_ids(encoder.encode(text, bodies))
        reused = position = 0
        for index in np.flatnonzero(np.isin(keep, list(encoder.control_ids))):
            run = encoder.decode(keep[reused : index + 1])
            end = position + len(run)
            if not text.startswith(run, position) or any(
                begin < end <= stop for begin, stop in bodies
            ):
                break
            reused, position = int(index) + 1, end
        spans = [(begin - position, stop - position) for begin, stop in bodies if begin >= position]
        previous = int(keep[reused - 1]) if reused else None
        ids = as_ids(encoder.encode(text[position:], spans, previous=previous))
        return np.concatenate([keep[:reused], ids])

    def after(
        self,
        sampled: SampledText,
        messages: Sequence[Message],
        tools: Sequence[Tool] | SharedTools | None = None,
    ) -> tuple[IdArray, Cursor]:
        """Return the ids to append with loss mask 0, and the cursor after them.

        The ids encode the rest of the turn close, the new messages, and the next generation prompt.

        Args:
            sampled: What was sampled after this prompt (`ChatTemplate.sampled`).
            messages: The message of the sampled turn, then the new messages.
            tools: The tools from now on. Default: the same tools as before.

        Raises `RewrittenError` if the template rewrites this prompt or the sampled turn. If history
        is preserved, it is raised only if the ids to append cannot be determined. Raises
        `HistoryRewrittenError` if `tools` changes this prompt, and `TemplateError` if the template
        refuses the conversation.
        """
        parts, head = self._parts, self._with_tools(tools)
        turn, new = self._prepared(messages)
        added = parts.bodies.spelled(
            [turn, *new],
            None if head is self._head else head.shared_tools,
            first=len(self._messages),
        )
        spelled = self._spelled.union(added)
        head = replace(head, texts=head.texts.with_arguments([turn, *new]))
        then = self._continuation(turn, new, head)
        prepared = [*then.before, *new]
        try:
            delta = self._derive(sampled, then, fork=parts.fork)
            if delta.rewritten is not None and parts.fork:
                raise HistoryRewrittenError(delta.rewritten)
        except HistoryRewrittenError as error:
            restart = Cursor(parts, prepared, head, spelled)
            restart.text = then.whole
            raise RewrittenError(error.reason, restart) from error
        bodies = parts.body_spans(
            delta.whole,
            prepared,
            head,
            spelled,
            since=Position(delta.cut, len(self._messages) + 1),
        )
        previous = sampled.last_id
        if previous is None:  # nothing was sampled: the delta follows the prompt
            previous = parts.encoder.ending_id(self.text)
        ids = as_ids(parts.encoder.encode(delta.text, bodies, previous=previous))
        after = Cursor(
            parts,
            prepared,
            head,
            spelled,
            delta=delta,
            turns=() if delta.bare or not parts.keep_scaffold else (*self._turns, len(self.text)),
        )
        return ids, after

    def derive(self, sampled: SampledText, messages: Sequence[Message]) -> RenderedDelta:
        """Return the delta that `after` appends if history is preserved. Its field `rewritten`
        describes what the template would rewrite.
        """
        then = self._continuation(*self._prepared(messages), self._head)
        return self._derive(sampled, then, fork=False)

    def _continuation(self, turn: Message, new: list[Message], head: Head) -> Continuation:
        before = [*self._messages, turn]
        render = self._parts.renderer.render_prepared
        return Continuation(before, new, head, render([*before, *new], head, generate=True))

    def _derive(self, sampled: SampledText, then: Continuation, *, fork: bool) -> RenderedDelta:
        served = ServedPrompt(self.text, self._turns if self._parts.keep_scaffold else None)
        return self._parts.deltas.derive(then, sampled, served, fork=fork)

    def _prepared(self, messages: Sequence[Message]) -> tuple[Message, list[Message]]:
        if not messages:
            raise TemplateError("`messages` must begin with the sampled turn's message")
        turn, *new = self._parts.renderer.prepare([plain_content(messages[0]), *messages[1:]])
        return turn, new

    def _with_tools(self, tools: Sequence[Tool] | SharedTools | None) -> Head:
        """Return the head of the conversation with `tools`.

        Raises `HistoryRewrittenError` if these tools change this cursor's prompt.
        """
        if tools is None:
            return self._head
        renderer = self._parts.renderer
        head = renderer.head(self._messages, tools)
        if head == self._head:
            return self._head
        if renderer.render_prepared(self._messages, head, generate=True) != self.text:
            change = _tools_change(self._head.shared_tools.tools, head.shared_tools.tools)
            raise HistoryRewrittenError(f"{TOOLS_CHANGED} ({change})")
        return head


class RewrittenError(HistoryRewrittenError):
    """The template rewrites the prompt of a cursor, or the turn that was sampled after it.

    `restart` is the cursor of the continued conversation, for a new sequence.
    """

    def __init__(self, reason: str, restart: Cursor) -> None:
        super().__init__(reason)
        self.restart = restart


def _tools_change(before: Sequence[Tool], after: Sequence[Tool]) -> str:
    """Name the tools that differ, at most three of each kind."""
    old, new = ({_tool_name(tool): tool for tool in tools} for tools in (before, after))
    kinds = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and repr(new[name]) != repr(old[name])],
    }
    named = (
        f"{kind}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for kind, names in kinds.items()
        if names
    )
    return "; ".join(named) or "their order changed"


def _tool_name(tool: Tool) -> str:
    return capped(str(tool.get("function", tool).get("name")), 80)
