"""Find the part of a sampled turn that its template does not show in history, and find whether it
shows all of its text.

Only text counts. Spacing, escapes (of JSON, Python and HTML) and the markers of the model's format
may differ. A call with unreadable arguments has no text here: its message has no form for them.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from toolroll.rollout.template.snapshot import texts_of
from toolroll.rollout.types import Message


def dropped_part(turn: Message, sampled: str, rendered: str) -> str | None:
    """Return "reasoning", "text" or "calls" if the text `rendered` lacks this part of `turn`.
    Return None if it lacks nothing.

    `turn` is the prepared message of the text `sampled`. Text that was not sampled is ignored.
    """
    source, unmatched = _normal(sampled), _normal(rendered)
    parts = {"text": turn.get("content"), "reasoning": turn.get("reasoning_content")}
    texts = [(name, str(text)) for name, text in parts.items() if text]
    # The longest first: a short answer may occur in the reasoning before it.
    for name, text in sorted(texts, key=lambda part: -len(squashed(part[1]))):
        for piece in _sampled_pieces(text, source):
            form = _form_in(unmatched, piece)
            if form is None:
                return name
            unmatched = unmatched.replace(form, "\0", 1) if form else unmatched
    names = Counter(call["function"]["name"] for call in turn.get("tool_calls") or ())
    lacks_a_call = any(
        min(source.count(_normal(name)), count) > unmatched.count(_normal(name))
        for name, count in names.items()
    )
    if lacks_a_call or any(
        _form_in(source, text) is not None and _form_in(unmatched, text) is None
        for text in _argument_texts(turn)
    ):
        return "calls"
    return None


_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|x[0-9a-fA-F]{2}|[nrtbf])?|<\|\w+\|>")
"""Matches an escape, and a marker such as `<|constrain|>`, which the template may not write."""
_WORD = re.compile(r"[-+.]?\d[\w.+-]*|\w+|[^\w\s\0-\x7f]+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Of Python, as JSON writes them."""


def shows_all(turn: Message, sampled: str, rendered: str, control: re.Pattern[str]) -> bool:
    """Return True if the text `rendered` has all words, numbers and control tokens of the text
    `sampled`. The words of the text, the reasoning and the tools' names of `turn` must be in the
    same order, and so must those of the arguments. No tool's name may be there more often.

    `turn` is the prepared message. `control` matches control tokens.
    """
    if not {*control.findall(sampled)} <= {*control.findall(rendered)}:
        return False  # such as the tags of a thought that is shown as text
    source, shown = words_of(sampled, control), words_of(rendered, control)
    counts, counts_shown = Counter(source), Counter(shown)
    texts, names, arguments = recorded_words(turn, control)
    # A call that cannot be read may be shown inside itself.
    if counts - counts_shown or any(0 < counts[name] < counts_shown[name] for name in names):
        return False
    return all(
        has_in_order(shown, [word for word in source if word in group])
        for group in ({*texts, *names}, {*arguments})
    )


def recorded_words(
    turn: Message, control: re.Pattern[str]
) -> tuple[list[str], list[str], list[str]]:
    """Return the words of a message's reasoning and text, of its tools' names, and of all
    arguments, without control tokens.
    """
    functions = [call["function"] for call in turn.get("tool_calls") or ()]
    items = [function.get("arguments") or "" for function in functions]
    written = [
        item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in items
    ]
    texts = [str(turn.get(name) or "") for name in ("reasoning_content", "content")]
    names = [function["name"] for function in functions]
    texts, names, arguments = (
        words_of(" ".join(part), control) for part in (texts, names, written)
    )
    return texts, names, arguments


def has_in_order(words: Sequence[str], part: Sequence[str]) -> bool:
    """Return True if `part` is left if some of `words` are taken away."""
    rest = iter(words)
    return all(word in rest for word in part)


def words_of(text: str, control: re.Pattern[str]) -> list[str]:
    """Return the words and numbers of `text`, without control tokens."""
    return _words(control.sub(" ", text))


def _words(text: str) -> list[str]:
    plain = _ESCAPE.sub(_unescaped, html.unescape(html.unescape(text)))
    plain = plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins surrogates
    words: list[str] = _WORD.findall(plain)
    return [_CONSTANTS.get(word, word) for word in words]


def _unescaped(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else " "


def _sampled_pieces(text: str, source: str) -> Iterator[str]:
    """Yield the longest pieces of `text` that `source` contains. A parser joins the texts around a
    call, so a text need not be one piece.
    """
    if _form_in(source, text) is not None:
        yield text
        return
    for line in text.splitlines():
        start = 0
        while start < len(line):
            stop = _longest(line, start, source)
            if line[start:stop].strip():
                yield line[start:stop]
            start = max(stop, start + 1)


def _longest(line: str, start: int, source: str) -> int:
    """Return the largest `stop` for which `source` contains `line[start:stop]`."""
    low, high = start, len(line)
    while low < high:
        middle = (low + high + 1) // 2
        if _form_in(source, line[start:middle]) is not None:
            low = middle
        else:
            high = middle - 1
    return low


def _argument_texts(turn: Message) -> Iterator[str]:
    for call in turn.get("tool_calls") or ():
        arguments: Any = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                continue  # the template takes JSON text, and shows this text
        yield from texts_of(arguments)


def _form_in(normal: str, text: str) -> str | None:
    """Return the form of `text` that is in `normal`, the normal form of another text."""
    text = text.strip()
    forms = (
        text,
        json.dumps(text, ensure_ascii=False)[1:-1],
        json.dumps(text)[1:-1],
        str(htmlsafe_json_dumps(text))[1:-1],
    )
    return next((form for form in map(_normal, forms) if form in normal), None)


def _normal(text: str) -> str:
    """Return `text` without white space, HTML escapes and backslashes. Text that was escaped twice,
    such as JSON in JSON, has the same form as text that was escaped once.
    """
    return squashed(html.unescape(html.unescape(text))).replace("\\", "")


def squashed(text: str) -> str:
    """Return `text` without white space."""
    return "".join(text.split())
