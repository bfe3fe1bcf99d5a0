"""`TemplateCheck`: are a row's tokens consistent with a chat template and the row's messages?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from toolroll.evaluation.audit.faults import NOT_WHOLE
from toolroll.evaluation.audit.row import Fault, Row
from toolroll.evaluation.export.messages import text_of
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.dropped import recorded_words, words_of
from toolroll.rollout.template.reference import RENDER_ERRORS, ReferenceRender
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.types import IdArray, Message, Tool

AFTER_STOP = "trained after the stop token"
STOP = "the stop token is not trained"
TURN = "a turn lacks words of its message"
TAIL = "the text after the last turn is not the template's"
UNMATCHED = "turns and messages cannot be matched"
PROMPT = "the prompt is not the template's"
DELTA = "a text between turns is not the template's"
_NEAR = 64  # tokens before a turn, in which its generation prompt is searched
_USER: Message = {"role": "user", "content": "x"}
_LONG_AGO = datetime.fromtimestamp(0)  # the date of a dated prompt is unknown: it is not compared


class TemplateCheck:
    """Compares rows with the chat template of `tokenizer`, or with `chat_template`. `kwargs` are
    the template's switches.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: Any = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        template = ChatTemplate(
            tokenizer, chat_template=chat_template, kwargs=kwargs, now=_LONG_AGO
        )
        self._tokenizer = tokenizer
        self._verifier = template.verifier
        self._control = template.encoder.pattern
        self._stops = np.array(template.stop_token_ids, np.int32)
        self._reference = ReferenceRender(tokenizer, chat_template, kwargs or {})
        history, header = self._reference.around_answer[0], self._generation_prompt([_USER], [])
        while header.rstrip() not in history:
            header = header[:-1]
        header = header.rstrip() if history.count(header.rstrip()) == 1 else ""
        self._header = np.array(tokenizer.encode(header, add_special_tokens=False), np.int32)

    def check(self, row: Row) -> list[Fault]:
        """Return the faults of `row`, which has messages."""
        try:
            return self._check(row)
        except RENDER_ERRORS:  # the template refuses the messages
            return [Fault(UNMATCHED, 0, len(row.ids), sure=False)]

    def _check(self, row: Row) -> list[Fault]:
        faults, spans = list[Fault](), row.spans()
        if not spans:
            return []
        stops = np.append(np.isin(row.ids, self._stops), False)
        for start, stop in spans:
            ends = np.flatnonzero(stops[start : stop - 1])
            if len(ends):
                faults.append(Fault(AFTER_STOP, int(start + ends[0] + 1), stop))
            if stops[stop] and not stops[stop - 1]:  # or the engine truncated the turn
                faults.append(Fault(STOP, stop, stop + 1, sure=False))
        turns = self._turns(row, spans)
        if not turns:
            return [*faults, Fault(UNMATCHED, 0, len(row.ids), sure=False)]
        ids = row.ids[: turns[-1].stop]
        sequence = ServedSequence(ids, turns, row.messages, row.tools, forked=row.forked)
        kind = self._verifier.check(sequence)
        if kind is not None and kind.startswith("render"):
            faults.append(Fault(UNMATCHED, 0, len(row.ids), sure=False))
        elif kind is not None and kind.startswith("prompt"):
            faults.append(self._prompt_fault(row, sequence))
        elif kind is not None:
            preserved = self._verifier.check(replace(sequence, preserved=True)) is None
            sure = not row.forked and not preserved and self._has_other_text(kind, sequence)
            faults.append(Fault(DELTA, turns[0].start, turns[-1].stop, sure))
        for turn in turns:
            if self._lacks_words(row, turn):
                faults.append(Fault(TURN, turn.start, turn.stop, sure=not row.forked))
        if self._has_other_tail(row, turns[-1]):
            faults.append(Fault(TAIL, turns[-1].stop, len(row.ids), sure=False))
        return faults

    def _turns(self, row: Row, spans: list[tuple[int, int]]) -> tuple[TurnSpan, ...]:
        """Return the trained turns with their messages, up to a turn that is not trained. Return
        none if they cannot be matched.

        The number of the message is the number of generation prompts up to the turn.
        """
        messages = [n for n, item in enumerate(row.messages) if item.get("role") == "assistant"]
        places = [start for start, _ in spans]
        if 0 < len(self._header) <= len(row.ids):
            windows = np.lib.stride_tricks.sliding_window_view(row.ids, len(self._header))
            starts = np.flatnonzero((windows == self._header).all(axis=1))
            places = starts[~row.trained[starts]].tolist()
        turns: list[TurnSpan] = []
        before = 0
        for start, stop in spans:
            number = int(np.searchsorted(places, start, side="right"))
            if turns and number > before + 1:
                break
            if not before < number <= len(messages):
                return ()
            stopped = bool(np.isin(row.ids[stop - 1], self._stops))
            turns.append(TurnSpan(start, stop, messages[number - 1], stopped))
            before = number
        return tuple(turns)

    def _prompt_fault(self, row: Row, sequence: ServedSequence) -> Fault:
        """Return the fault of the tokens before the first turn. It is sure if the turn does not
        follow a generation prompt: any other difference may be intended, such as a prompt hook.
        """
        ids, first = sequence.input_ids, sequence.turns[0]
        opening = self._generation_prompt(sequence.messages[: first.message], sequence.tools)
        size = len(self._tokenizer.encode(opening, add_special_tokens=False)) + _NEAR
        for start in range(first.start, max(0, first.start - _NEAR), -1):
            if opening and self._decode(ids[:start][-size:]).endswith(opening):
                if start == first.start:
                    return Fault(PROMPT, 0, start, sure=False)
                return Fault(NOT_WHOLE, start, first.start, sure=not row.forked)
            if ids[start - 1] in self._stops:
                break  # what is before it is not of this turn
        return Fault(PROMPT, 0, first.start, sure=bool(opening) and not row.forked)

    def _has_other_text(self, kind: str, sequence: ServedSequence) -> bool:
        """Return False if the text between the turns is right, and only its ids are others."""
        rendered = self._render(sequence.messages, sequence.tools)
        gaps = [slice(turn.stop, following.start) for turn, following in pairwise(sequence.turns)]
        texts = [self._decode(sequence.input_ids[gap]) for gap in gaps]
        return not kind.endswith("tokens") or not all(text in rendered for text in texts)

    def _has_other_tail(self, row: Row, last: TurnSpan) -> bool:
        """Return True if the template cannot have written the tokens after the last turn of the
        messages. Padding may follow.
        """
        later = [item for item in row.messages[last.message + 1 :] if item["role"] == "assistant"]
        stop, tail = self._decode(row.ids[last.stop - 1 : last.stop]), row.ids[last.stop :]
        text = self._decode(tail).partition(self._tokenizer.pad_token or "\0")[0].rstrip("\ufffd")
        if later or not last.stopped or not text:
            return False
        rendered = self._render(row.messages, row.tools)
        return stop in rendered and stop + text not in rendered

    def _lacks_words(self, row: Row, turn: TurnSpan) -> bool:
        message = self._reference.prepared(row.messages[turn.message])
        message["content"] = text_of(message.get("content") or "")
        texts, _, arguments = recorded_words(message, self._control)
        expected = Counter(word for word in [*texts, *arguments] if word.isalpha())
        text = self._decode(row.ids[turn.start : turn.stop])
        return bool(expected - Counter(words_of(text, self._control)))

    def _generation_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return what the template writes before a turn, or "" if it is unclear."""
        try:
            prompt = self._render(messages, tools)
            without = self._render(messages, tools, generate=False)
        except RENDER_ERRORS:
            return ""
        return prompt.removeprefix(without) if prompt.startswith(without) else ""

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool = True
    ) -> str:
        prepared = [self._reference.prepared(message) for message in messages]
        return self._reference.render(prepared, list(tools) or None, generate=generate)

    def _decode(self, ids: IdArray) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
