"""Play dialogues through `ChatTemplate`, one delta at a time, and judge each delta.

Only this module depends on the public interface of `ChatTemplate`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from support.adversarial.dialogues import Conversation, Messages, Tools, dialogues
from support.adversarial.templates import Template
from support.adversarial.token_judge import Inapplicable, Judge, Refused, Said, Truth, Unclear
from support.oracle_verdict import History, Outcome
from support.oracle_verdict import outcome_of as called
from tokenizers import AddedToken

from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.template import ChatTemplate
from toolroll.testing import load_embedded_tokenizer

WRONG = ("wrong", "injected", "raises", "fork-wrong", "prompt-wrong", "crashed")
"""What never may be. `raises`: appended although the template refuses the conversation."""
UNNEEDED = ("fork-unneeded", "refused-unneeded")


@dataclass(frozen=True)
class Row:
    """The verdict on one delta, fork or prompt."""

    template: str
    dialogue: str
    turn: int
    verdict: str
    detail: str = ""


@lru_cache(maxsize=4)
def tokenizer_with(control: tuple[str, ...], eos: str) -> Any:
    """The embedded tokenizer with further control tokens, and with `eos` to end turns."""
    tokenizer = load_embedded_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.eos_token = eos
    return tokenizer


def tokenizer_of(template: Template) -> Any:
    """The tokenizer that a template is judged with."""
    tokenizer = tokenizer_with(template.control, template.stops[0])
    tokenizer.chat_template = template.source
    return tokenizer


def control_words(judge: Judge) -> dict[str, str]:
    """The control-token texts that bodies are spoiled with."""
    known = [text for text in judge.control if text != "<|pad|>"]
    named = {"end": judge.template.stops[0], "turn": next(iter(judge.template.control), "<|turn|>")}
    for key, text in (("think", "<think>"), ("unthink", "</think>"), ("call", "<tool_call>")):
        named[key] = text if text in known else known[0]
    return {**named, "uncall": "</tool_call>" if "</tool_call>" in known else known[0]}


class Player:
    """One template with one `ChatTemplate`, whose caches all dialogues use."""

    def __init__(
        self, template: Template, history: History = "fork", tokenizer: Any = None
    ) -> None:
        self.template = template
        self.history: History = history
        tokenizer = tokenizer if tokenizer is not None else tokenizer_of(template)
        self.judge = Judge(tokenizer, template)
        self.subject = ChatTemplate(tokenizer, chat_template=template.source, history=history)
        self.rows: list[Row] = []

    def play_all(self, seed: str, each: int = 1, limit: int | None = None) -> list[Row]:
        """Play a set of dialogues; at most `limit` of them, of kinds that the seed chooses."""
        made = dialogues(f"{self.template.name}/{seed}", control_words(self.judge), each=each)
        if limit is not None and limit < len(made):
            loops = [dialogue for dialogue in made if dialogue.kind == "loop"]
            rng = random.Random(f"{self.template.name}/{seed}")
            made = [rng.choice(loops), *rng.sample(made, limit - 1)]
        for dialogue in made:
            self.play(dialogue)
        return self.rows

    def play(self, dialogue: Conversation) -> None:
        """Play one dialogue; it ends if the template refuses to go on."""
        messages, tools = [dict(message) for message in dialogue.first], dialogue.tools
        rng = random.Random(dialogue.name)
        stream = self._prompt(dialogue, messages, tools)
        if stream is None:
            return
        for turn, step in enumerate(dialogue.steps, 1):
            try:
                said = self.judge.say(messages, step, tools, rng)
            except Inapplicable as reason:
                self._add(dialogue, turn, "inapplicable", str(reason))
                return
            truth = self.judge.truth(messages, said, step.new, tools)
            outcome = outcome_of(self.subject, [*messages, said.turn], step.new, tools, said)
            verdict = verdict_on(truth, outcome, self.history)
            detail = self._detail(truth, outcome) if verdict in WRONG + UNNEEDED else ""
            self._add(dialogue, turn, verdict, detail)
            served, messages = [*stream, *said.ids], [*messages, said.turn, *step.new]
            if truth.kind == "raises":
                return
            if truth.ids is not None and (truth.kind != "rewrite" or self.history == "preserve"):
                stream = [*served, *truth.ids]
            else:
                forked = self._fork(dialogue, turn, served, messages, tools)
                if forked is None:
                    return
                stream = forked

    def _prompt(
        self, dialogue: Conversation, messages: Messages, tools: Tools
    ) -> list[int] | None:
        try:
            expected = self.judge.prompt(messages, tools)
        except (Refused, Unclear) as reason:
            self._add(dialogue, 0, "inapplicable", f"the first prompt: {reason}")
            return None
        outcome = _outcome(lambda: self.subject.prompt(messages, tools))
        if outcome == ("append", expected):
            self._add(dialogue, 0, "exact")
        else:
            verdict = "refused-unneeded" if outcome[0] == "refuse" else "prompt-wrong"
            self._add(dialogue, 0, verdict, self._detail(Truth("append", expected), outcome))
        return expected

    def _fork(
        self,
        dialogue: Conversation,
        turn: int,
        stream: Sequence[int],
        messages: Messages,
        tools: Tools,
    ) -> list[int] | None:
        keep = np.array(stream, dtype=np.int32)
        what, value = _outcome(lambda: self.subject.start(messages, tools).prompt(keep=keep))
        if what != "append":
            verdict = "unclear" if self._unclear(messages, tools) else "refused-unneeded"
            self._add(dialogue, turn, verdict, f"fork: {value}")
            return None
        right = self.judge.fork_is_right(value, stream, messages, tools)
        verdict = {True: "fork-exact", False: "fork-wrong", None: "unclear"}[right]
        detail = "" if right is not False else f"fork prompt: {self.judge.decode(value)[-400:]!r}"
        self._add(dialogue, turn, verdict, detail)
        return value if right else None

    def _unclear(self, messages: Messages, tools: Tools) -> bool:
        try:
            self.judge.render(messages, tools, generate=True)
        except Unclear:
            return True
        return False

    def _detail(self, truth: Truth, outcome: Outcome) -> str:
        what, value = outcome
        expected = None if truth.ids is None else self.judge.decode(truth.ids)
        got = self.judge.decode(value) if what == "append" else f"{type(value).__name__}: {value}"
        same = " (the same text in other tokens)" if got == expected else ""
        return (
            f"{truth.kind} {truth.why}: expected {expected!r:.300}, got {what} {got!r:.300}{same}"
        )

    def _add(self, dialogue: Conversation, turn: int, verdict: str, detail: str = "") -> None:
        self.rows.append(Row(self.template.name, dialogue.name, turn, verdict, detail))


def outcome_of(
    subject: ChatTemplate,
    messages: Messages,
    new: Messages,
    tools: Tools,
    said: Said,
) -> Outcome:
    """What `ChatTemplate.delta` makes of a step."""
    given: Any = {"sampled_ids": said.ids, "finish_reason": "stop" if said.stop else "length"}
    return _outcome(lambda: subject.delta(messages, new, tools=tools, **given))


def _outcome(make: Any) -> Outcome:
    return called(make, HistoryRewrittenError, TemplateError)


def verdict_on(truth: Truth, outcome: Outcome, history: History) -> str:
    """The verdict on an outcome."""
    what, value = outcome
    kept = truth.kind in ("append", "drift") or (
        truth.kind == "rewrite" and history == "preserve" and truth.ids is not None
    )
    if what == "crash":
        return "crashed"
    if what == "refuse":
        return {"raises": "refused-right", "unclear": "unclear"}.get(truth.kind, "refused-unneeded")
    if what == "fork":
        return "fork-unneeded" if kept else "unclear" if truth.kind == "unclear" else "fork-right"
    if truth.kind in ("raises", "unclear"):
        return truth.kind
    if kept and value == truth.ids:
        return "preserved" if truth.kind == "rewrite" else "exact"
    if truth.kind == "rewrite" and history == "preserve" and truth.ids is None:
        return "preserved-unclear"
    return "injected" if value == truth.careless != truth.ids else "wrong"


def counts(rows: Sequence[Row]) -> Counter[str]:
    """How often each verdict was given."""
    return Counter(row.verdict for row in rows)


def bad(rows: Sequence[Row], verdicts: Sequence[str] = WRONG, limit: int = 30) -> str:
    """The rows with one of `verdicts`, one a line."""
    found = [row for row in rows if row.verdict in verdicts]
    lines = [f"{r.verdict} {r.template} {r.dialogue} turn {r.turn}: {r.detail}" for r in found]
    return "\n".join(lines[:limit])
