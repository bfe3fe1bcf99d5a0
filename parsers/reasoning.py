"""Reasoning in `<think>` tags, apart from what the reply says."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, *, in_reasoning: bool = False) -> tuple[str | None, bool, int]:
    """The reasoning (None for none), whether it was closed, and where the rest of `text` begins.

    `in_reasoning`: the prompt opened it already. A reply that only closes it counts as reasoning up to there too.
    """
    lead = len(text) - len(text.lstrip())
    opened = text.startswith(OPEN, lead)
    start = lead + len(OPEN) if opened else 0
    end = text.find(CLOSE, start)
    if end < 0:
        if opened or in_reasoning:
            return text[start:].strip("\n"), False, len(text)
        return None, True, 0
    if not opened and not in_reasoning and OPEN in text[:end]:
        return None, True, 0  # tags in mid-reply are text
    reasoning = text[start:end].strip("\n")
    rest = end + len(CLOSE)
    while rest < len(text) and text[rest] == "\n":
        rest += 1
    return reasoning or None, True, rest
