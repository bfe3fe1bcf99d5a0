"""`TemplateCheck`: are a row's tokens and its turns consistent with a chat template and the row's
messages?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from toolroll.audit.report import Fault
from toolroll.audit.row import Row
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.dropped import recorded_words, words_of
from toolroll.rollout.template.reference import RENDER_ERRORS, ReferenceRender
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.types import IdArray, Message, Tool

AFTER_STOP = "trained after the stop token"
STOP = "the stop token is not trained"
TURN = "a turn lacks words of its message"
TAIL = "the end is not the template's"
START = "a turn does not follow a generation prompt"
UNMATCHED = "turns and messages cannot be matched"
KEPT = "history is kept that the template rewrites"
_USER: Message = {"role": "user", "content": "x"}
_LONG_AGO = datetime.fromtimestamp(0)  # the date in a prompt is not known, so it is not compared


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
        opening = self._generation_prompt([self._reference.prepared(_USER)], None)
        before_answer = self._reference.around_answer[0]
        while before_answer.count(opening.rstrip()) == 0:
            opening = opening[:-1]
        header = self._encode(opening.rstrip()) if before_answer.count(opening.rstrip()) == 1 else []
        self._header = np.array(header, np.int32)

    def check(self, row: Row) -> tuple[list[Fault], list[Fault]]:
        """Return the faults of `row`, and what cannot be decided. `row` has messages."""
        spans = row.spans()
        faults, undecided = self._stops_of(row, spans)
        turns = self._turns(row, spans)
        if not turns:
            return faults, [*undecided, Fault(UNMATCHED, 0, len(row.ids))]
        sequence = ServedSequence(
            row.ids[: turns[-1].stop],
            turns,
            row.messages or [],
            row.tools or [],
            forked=row.forked,
        )
        kind = self._verifier.check(sequence)
        if kind is not None:
            preserved = self._verifier.check(replace(sequence, preserved=True)) is None
            start, stop = (0, turns[0].start) if kind.startswith("prompt") else (
                turns[0].start, turns[-1].stop
            )
            if preserved:
                undecided.append(Fault(KEPT, start, stop))
            else:
                fault = Fault(f"template: {kind.partition(':')[0]}", start, stop)
                sure = not row.forked and self._is_sure(kind, sequence)
                (faults if sure else undecided).append(fault)
        for turn in turns:
            if self._lacks_words(row, turn):
                (undecided if row.forked else faults).append(Fault(TURN, turn.start, turn.stop))
        return faults, undecided

    def _is_sure(self, kind: str, sequence: ServedSequence) -> bool:
        """Return False if a hook of the loop, or ids that are not canonical, may be the reason."""
        first, ids = sequence.turns[0], sequence.input_ids
        if kind.startswith("prompt"):
            messages = [self._reference.prepared(one) for one in sequence.messages[: first.message]]
            opening = self._generation_prompt(messages, list(sequence.tools) or None)
            return not self._decode(ids[: first.start]).endswith(opening)
        if not kind.endswith("tokens"):
            return True
        prepared = [self._reference.prepared(one) for one in sequence.messages]
        whole = self._reference.render(prepared, list(sequence.tools) or None)
        deltas = [ids[one.stop : two.start] for one, two in pairwise(sequence.turns)]
        return not all(self._decode(delta) in whole for delta in deltas)

    def _decode(self, ids: IdArray) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _stops_of(
        self, row: Row, spans: list[tuple[int, int]]
    ) -> tuple[list[Fault], list[Fault]]:
        eos = self._tokenizer.eos_token_id
        faults, undecided = [], []
        is_stop = np.isin(row.ids, self._stops)
        for start, stop in spans:
            ends = np.flatnonzero(row.ids[start:stop] == eos)
            if len(ends) and start + ends[0] + 1 < stop:
                faults.append(Fault(AFTER_STOP, int(start + ends[0] + 1), stop))
            if not is_stop[stop - 1] and is_stop[stop : stop + 1].any():
                undecided.append(Fault(STOP, stop, stop + 1))
        return faults, undecided

    def _turns(self, row: Row, spans: list[tuple[int, int]]) -> tuple[TurnSpan, ...]:
        """Return the trained turns with their messages, up to a turn that is not trained. Return
        none if they cannot be matched.
        """
        messages = [n for n, one in enumerate(row.messages or []) if one["role"] == "assistant"]
        size, ids = len(self._header), row.ids
        if not size:
            places = [start for start, _ in spans]
        else:
            windows = np.lib.stride_tricks.sliding_window_view(ids, min(size, len(ids)))
            places = np.flatnonzero((windows == self._header).all(axis=1)).tolist()
            places = [at for at in places if not row.trained[at]]
        numbers = [sum(at <= start for at in places) for start, _ in spans]
        turns: list[TurnSpan] = []
        for number, (start, stop) in zip(numbers, spans, strict=True):
            if turns and number > before + 1:
                break
            if not 0 < number <= len(messages) or (turns and number == before):
                return ()
            stopped = bool(np.isin(ids[stop - 1], self._stops))
            turns.append(TurnSpan(start, stop, messages[number - 1], stopped))
            before = number
        return tuple(turns)

    def _lacks_words(self, row: Row, turn: TurnSpan) -> bool:
        text = self._decode(row.ids[turn.start : turn.stop])
        message = self._reference.prepared((row.messages or [])[turn.message])
        recorded = [word for part in recorded_words(message, self._control) for word in part]
        wanted = Counter(word for word in recorded if word.isalpha())
        return bool(wanted - Counter(words_of(text, self._control)))

    def _generation_prompt(self, messages: list[Message], tools: list[Tool] | None) -> str:
        """Return what the template writes before a turn after `messages`, or "" if it is unclear."""
        try:
            prompt, without = (
                self._reference.render(messages, tools, generate=generate)
                for generate in (True, False)
            )
        except RENDER_ERRORS:
            return ""
        return prompt.removeprefix(without) if prompt.startswith(without) else ""
