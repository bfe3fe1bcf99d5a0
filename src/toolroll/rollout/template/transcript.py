"""Convert recorded conversations to tokens: the render of the whole conversation, with a loss mask
on the assistant's text.

This is for SFT and for replaying transcripts. The engine sampled nothing, so the trajectory has
`source="transcript"`, and RL adapters refuse it.

Invariants:

- The tokens decode to the render of the whole conversation.
- A trained span starts after the generation prompt and ends with the stop token, like a sampled
  turn. It ends before a turn close that models do not sample (gpt-oss: `<|end|>`).
- If the template does not show all of a turn (`dropped.py`), or renders the turn differently once
  messages follow, the turn is context (mask 0), and `Turn.excluded` gives the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolroll.parsers.types import Span
from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.delta import EMPTY_ELEMENT, SampledText
from toolroll.rollout.template.dropped import (
    dropped_part,
    has_in_order,
    recorded_words,
    words_of,
)
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.template.render import plain_content
from toolroll.rollout.types import Message, MessageSpan, Tool, Trajectory, Turn

_OTHER_PARTS = ("refusal", "function_call", "reasoning_details")
"""What OpenAI's and OpenRouter's messages may have, and no template shows."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The characters [start, stop) of the render, which contain the messages `first` to `last`."""

    start: int
    stop: int
    first: int
    last: int
    trained: bool = False
    excluded: str | None = None


def tokenize_conversation(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None = None
) -> Trajectory:
    """Return the tokens of a recorded conversation. The assistant's text and stop tokens have loss
    mask 1.

    `Trajectory.spans` gives the token span of each assistant message. The messages between two
    assistant messages, and the generation prompt, share one span.

    If the template does not show a turn's reasoning, text or calls, or renders the turn differently
    once messages follow, the turn has mask 0 and `Turn.excluded` gives the reason. For example,
    Qwen3.5 removes reasoning when a user message follows. To train on such a turn too, tokenize the
    conversation up to that turn as a separate sample.

    Raises `TemplateError` if the template refuses the conversation.
    """
    messages = [_plain(message) for message in messages]
    text, bodies = template.conversation(messages, tools, generate=False)
    pieces = _Recorded(template, messages, tools, text).pieces()
    ids: list[int] = []
    mask: list[int] = []
    spans: list[MessageSpan] = []
    turns: list[Turn] = []
    for piece, added in _encoded(template, text, bodies, pieces, None):
        start = len(ids)
        ids += added
        mask += [int(piece.trained)] * len(added)
        spans.append(MessageSpan(piece.first, piece.last, start, len(ids)))
        if piece.trained or piece.excluded:
            turns.append(Turn(start, len(ids), "stop", excluded=piece.excluded))
    first = next((turn.start for turn in turns if turn.excluded is None), len(ids))
    return Trajectory(
        as_ids(ids),
        np.array(mask, dtype=np.int32),
        np.full(len(ids), np.nan, dtype=np.float32),
        tuple(turns),
        first,
        source="transcript",
        spans=tuple(spans),
    )


def last_message_delta(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None = None
) -> tuple[list[int], list[int]]:
    """Return the ids and the loss mask that the last message adds to the conversation before it. A
    run of tool messages at the end counts as one message.

    An assistant message adds the generation prompt (mask 0), its text up to and including the stop
    token (mask 1), and the rest of the turn close (mask 0).

    Raises `HistoryRewrittenError` if the last message changes how earlier messages are rendered, or
    if the template does not show all of it.
    """
    messages = [_plain(message) for message in messages]
    before = _before_last(messages)
    text, bodies = template.conversation(messages, tools, generate=False)
    prior = template.renderer.render(messages[:before], tools, generate=False) if before else ""
    if not text.startswith(prior):
        raise HistoryRewrittenError(
            f"messages[{before}] changes how the messages before it are rendered"
        )
    pieces = [_Piece(len(prior), len(text), before, len(messages) - 1)]
    if messages[-1].get("role") == "assistant":
        prompted = template.renderer.render(messages[:before], tools, generate=True)
        if not (prompted.startswith(prior) and text.startswith(prompted)):
            raise HistoryRewrittenError(
                f"the render of messages[{before}] (assistant) does not start with the generation "
                "prompt"
            )
        stop = _sampled_text_end(template, text, len(prompted))
        recorded = _Recorded(template, messages, tools, text)
        reason = recorded.altered(before, text[len(prompted) : stop])
        if reason is not None:
            raise HistoryRewrittenError(f"messages[{before}] (assistant): {reason}")
        pieces = [
            _Piece(len(prior), len(prompted), before, before),
            _Piece(len(prompted), stop, before, before, trained=True),
            _Piece(stop, len(text), before, before),
        ]
    ids: list[int] = []
    mask: list[int] = []
    previous = template.encoder.ending_id(prior)
    for piece, added in _encoded(template, text, bodies, pieces, previous):
        ids += added
        mask += [int(piece.trained)] * len(added)
    return ids, mask


def _plain(message: Message) -> Message:
    """Return `message` with its text as one string: many templates write null as a word."""
    if message.get("role") == "assistant" and not message.get("tool_calls"):
        message = {**message, "content": message.get("content") or ""}
    return plain_content(message)


def _before_last(messages: Sequence[Message]) -> int:
    """Return the number of messages before the last one, or before the run of tool messages at the
    end (Qwen groups them).
    """
    before = len(messages) - 1
    while (
        before > 0
        and messages[before].get("role") == "tool"
        and messages[before - 1].get("role") == "tool"
    ):
        before -= 1
    return before


def _encoded(
    template: ChatTemplate,
    text: str,
    bodies: Sequence[Span],
    pieces: Sequence[_Piece],
    previous: int | None,
) -> Iterator[tuple[_Piece, list[int]]]:
    """Yield the consecutive `pieces` of the render `text`, each with its ids. `previous` is the id
    before the first piece (see `Encoder.encode`).
    """
    for piece in pieces:
        within = [
            (start - piece.start, stop - piece.start)
            for start, stop in bodies
            if piece.start <= start and stop <= piece.stop
        ]
        ids = template.encoder.encode(text[piece.start : piece.stop], within, previous=previous)
        previous = ids[-1] if ids else previous
        yield piece, ids


def _sampled_text_end(template: ChatTemplate, text: str, begin: int) -> int:
    """Return where the last turn's sampled text ends in `text`: after its stop token, or at the end
    if the template does not close turns.
    """
    return max(
        (pos + len(stop) for stop in template.stop_texts if (pos := text.rfind(stop)) >= begin),
        default=len(text),
    )


def _spelled_marker(template: ChatTemplate, turn_text: str) -> str | None:
    """Return the text of a stop token in the middle of a turn, or None if there is none."""
    ended = next((stop for stop in template.stop_texts if turn_text.endswith(stop)), "")
    return next(
        (mark for mark in template.stop_texts if mark in turn_text.removesuffix(ended)), None
    )


def _sampled_until(template: ChatTemplate, text: str, stop: int) -> int:
    """Return the end of the sampled text in the turn that ends at `stop`.

    This is `stop`, or the start of the turn close if models do not sample that close: gpt-oss
    samples `<|return|>`, but its history renders `<|end|>`.
    """
    if text.endswith(template.stop_texts, 0, stop):
        return stop
    return next(
        (
            match.start()
            for match in template.encoder.pattern.finditer(text, 0, stop)
            if match.end() == stop
        ),
        stop,
    )


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded conversation. `text` is the render of the whole conversation."""

    template: ChatTemplate
    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    text: str

    def pieces(self) -> list[_Piece]:
        """Split the whole render at the start and the end of each assistant turn."""
        pieces: list[_Piece] = []
        pos = first = 0
        unplaced: str | None = None
        for index, message in enumerate(self.messages):
            if message.get("role") != "assistant":
                continue
            begin = self._begin(index)
            stop = self._end(index, begin or pos)
            if stop is None or not pos <= (begin or pos) <= stop:
                # the turn becomes part of the next piece
                unplaced = "the position of this turn in the whole render is unknown"
                continue
            if begin is None:
                reason = (
                    "the template does not show the generation prompt before this turn once "
                    "messages follow"
                )
                pieces.append(_Piece(pos, stop, first, index, excluded=reason))
            else:
                pieces.append(_Piece(pos, begin, first, index - 1, excluded=unplaced))
                pieces += self._turn(index, begin, stop)
            pos, first, unplaced = stop, index + 1, None
        pieces.append(_Piece(pos, len(self.text), first, len(self.messages) - 1, excluded=unplaced))
        return [piece for piece in pieces if piece.stop > piece.start]

    def _turn(self, index: int, begin: int, stop: int) -> list[_Piece]:
        """Return the pieces of turn `index`, which is rendered from `begin` to `stop`."""
        sampled_stop = _sampled_until(self.template, self.text, stop)
        spelled = _spelled_marker(self.template, self.text[begin:stop])
        reason = (
            self.altered(index, self.text[begin:sampled_stop])
            if spelled is None
            else f"its text contains {spelled!r}, which would be trained as the control token"
        )
        if reason is not None:
            return [_Piece(begin, stop, index, index, excluded=reason)]
        trained = _Piece(begin, sampled_stop, index, index, trained=True)
        return [trained, _Piece(sampled_stop, stop, index, index)]

    def altered(self, index: int, shown: str) -> str | None:
        """Return why turn `index`, which is rendered as `shown`, is not shown as it was recorded.
        Return None if it is.
        """
        if index < len(self.messages) - 1:
            upto = self.messages[: index + 1]
            alone = self.template.renderer.render(upto, self.tools, generate=False)
            recorded = replace(self, messages=upto, text=alone)
            begin = recorded._begin(index)
            last = "" if begin is None else alone[begin : recorded._end(index, begin)]
            # As in an episode, an empty element that only the end of a conversation has is no part
            # of the turn (Qwen3's `<think>`).
            added = last.removesuffix(shown) if last.endswith(shown) else ""
            last = last.removeprefix(added) if EMPTY_ELEMENT.fullmatch(added) else last
            # one of the two may lack the close: GLM's last turn, and see `_sampled_until`
            if shown not in (last, self._body(last)) and last != self._body(shown):
                return "the template renders this turn differently once messages follow"
        part = self._dropped(self.messages[index], shown)
        if part is not None:
            return f"the template does not show the {part} of this turn"
        return None

    def _dropped(self, message: Message, shown: str) -> str | None:
        """Return the part of `message` that its render `shown` lacks, as `dropped_part` does."""
        [turn] = self.template.renderer.prepare([message])
        names = ("reasoning_content", "reasoning", "thinking")
        turn = {**turn, "reasoning_content": next(filter(None, map(turn.get, names)), None)}
        for recorded, call in zip(
            *(m.get("tool_calls") or () for m in (message, turn)), strict=True
        ):
            arguments = recorded["function"].get("arguments")
            if not call["function"].get("arguments") and str(arguments or "").strip("{} \n"):
                return "calls"  # unreadable arguments are rendered as {}
        part = dropped_part(turn, json.dumps(turn, ensure_ascii=False), shown)
        if part is not None:
            return part
        control = self.template.encoder.pattern
        words, recorded = words_of(shown, control), recorded_words(turn, control)
        if not all(has_in_order(words, group) for group in recorded):
            return "whole text"
        return next(filter(message.get, _OTHER_PARTS), None if any(recorded) else "text")

    def _body(self, turn_text: str) -> str:
        """Return the text of a turn without the token that closes it."""
        stops = self.template.stop_texts
        return turn_text.removesuffix(next(filter(turn_text.endswith, stops), ""))

    def _begin(self, index: int) -> int | None:
        """Return where turn `index` starts in `text`, after its generation prompt. Return None if
        the whole render does not contain that prompt.
        """
        prompt = self.template.renderer.render(self.messages[:index], self.tools, generate=True)
        if self.text.startswith(prompt):
            return len(prompt)
        turns = (n for n in reversed(range(index)) if self.messages[n].get("role") == "assistant")
        before = next(turns, None)
        if before is None:
            return None
        # an earlier turn is rendered differently, but the text after it may be the same
        then = self._text_after(before, index)
        end = None if then is None else self._end(before, 0)
        if then is None or end is None or not self.text.startswith(then, end):
            return None
        return end + len(then)

    def _end(self, index: int, begin: int) -> int | None:
        """Return where turn `index` ends in `text`, including its stop token. Return None if the
        end is unknown or the template moves it.
        """
        if index == len(self.messages) - 1:
            return _sampled_text_end(self.template, self.text, begin)
        then = self._text_after(index)
        if then is None:
            return None
        full_text = self.template.renderer.render(self.messages, self.tools, generate=True)
        pos = len(full_text) - len(then)
        return pos if full_text[:pos] == self.text[:pos] else None

    def _text_after(self, index: int, stop: int | None = None) -> str | None:
        """Return the text after turn `index` in the render of the messages before `stop` (default:
        all), up to and including the last generation prompt. Return None if this text is unknown.
        """
        for mark in self.template.stop_texts:
            try:
                cursor = self.template.start(self.messages[:index], self.tools)
                return cursor.derive(SampledText(mark, mark), self.messages[index:stop]).text
            except (HistoryRewrittenError, TemplateError):
                continue
        return None
