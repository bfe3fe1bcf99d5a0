"""The tokenizers of templates, and the verdicts on what `Conversation` makes of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from support.adversarial.templates import Template
from support.adversarial.token_judge import Judge, Truth
from support.oracle_verdict import History
from tokenizers import AddedToken

from toolroll.testing import load_embedded_tokenizer

WRONG = ("wrong", "injected", "raises", "fork-wrong", "prompt-wrong")
"""What never may be. `raises`: appended although the template refuses the conversation."""
UNNEEDED = ("fork-unneeded", "refused-unneeded")


@dataclass(frozen=True)
class Row:
    """The verdict on one delta, fork or prompt."""

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


def verdict_on(truth: Truth, appended: Sequence[int] | None, history: History) -> str:
    """The verdict on the ids that were appended, or on a fork (None)."""
    kept = truth.kind in ("append", "drift") or (
        truth.kind == "rewrite" and history == "preserve" and truth.ids is not None
    )
    if appended is None:
        return "fork-unneeded" if kept else "fork-right"
    if truth.kind in ("raises", "unclear"):
        return truth.kind
    if kept and appended == truth.ids:
        return "preserved" if truth.kind == "rewrite" else "exact"
    if truth.kind == "rewrite" and history == "preserve" and truth.ids is None:
        return "preserved-unclear"
    return "injected" if appended == truth.careless != truth.ids else "wrong"


def counts(rows: Sequence[Row]) -> Counter[str]:
    """How often each verdict was given."""
    return Counter(row.verdict for row in rows)


def bad(rows: Sequence[Row], verdicts: Sequence[str] = WRONG, limit: int = 30) -> str:
    """The rows with one of `verdicts`, one a line."""
    found = [row for row in rows if row.verdict in verdicts]
    lines = [f"{r.verdict} {r.dialogue} turn {r.turn}: {r.detail}" for r in found]
    return "\n".join(lines[:limit])
