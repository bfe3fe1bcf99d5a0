"""Find the part of a sampled turn that its template does not show in history.

Only text counts. Spacing, JSON escapes, HTML escapes and the markers of the model's format may
differ. A call whose arguments cannot be read has no text here: its message has no form for them.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from toolroll.rollout.template.bodies import texts_of
from toolroll.rollout.types import Message


def dropped_part(turn: Message, sampled: str, shown: str) -> str | None:
    """Return "reasoning", "text" or "calls" if the text `shown` lacks this part of `turn`. Return
    None if it lacks nothing.

    `turn` is the prepared message of the text `sampled`. Text that was not sampled is ignored.
    """
    said, rest = squashed(sampled), squashed(shown)
    parts = {"text": turn.get("content"), "reasoning": turn.get("reasoning_content")}
    texts = [(name, str(text)) for name, text in parts.items() if text]
    # The longest first: a short answer may occur in the reasoning before it.
    for name, text in sorted(texts, key=lambda part: -len(squashed(part[1]))):
        for piece in [text] if _form_in(said, text) is not None else text.splitlines():
            form = _form_in(rest, piece)
            if form is not None:
                rest = rest.replace(form, "\0", 1) if form else rest
            elif _form_in(said, piece) is not None:
                return name
    names = Counter(call["function"]["name"] for call in turn.get("tool_calls") or ())
    lacks_a_call = any(
        min(said.count(squashed(name)), count) > rest.count(squashed(name))
        for name, count in names.items()
    )
    if lacks_a_call or any(
        _form_in(said, text) is not None and _form_in(rest, text) is None
        for text in _argument_texts(turn)
    ):
        return "calls"
    return None


def _argument_texts(turn: Message) -> Iterator[str]:
    for call in turn.get("tool_calls") or ():
        arguments: Any = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                continue  # the template takes JSON text, and shows this text
        yield from texts_of(arguments)


def _form_in(squashed_text: str, text: str) -> str | None:
    """Return the form of `text` that is in `squashed_text`, without white space."""
    text = text.strip()
    forms = (
        text,
        json.dumps(text, ensure_ascii=False)[1:-1],
        json.dumps(text)[1:-1],
        html.escape(text),
        repr(text)[1:-1],
    )
    return next((form for form in map(squashed, forms) if form in squashed_text), None)


def squashed(text: str) -> str:
    """Return `text` without white space."""
    return "".join(text.split())
