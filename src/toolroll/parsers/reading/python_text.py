"""Read calls and literals in Python syntax, `f(a=1, b=['x', None])`, in a text that arrives in
pieces.

Invariants: nothing is evaluated. A value ends as in Python, with one exception: a quote closes its
string only if the next character can follow a value, because some templates do not escape quotes.
JSON's `true`, `false` and `null` are read too.
"""

from __future__ import annotations

import codecs
import math
import re
from typing import Any

from toolroll.parsers.reading.json_text import MAX_DEPTH, Members, Unreadable
from toolroll.parsers.reading.source import Source, Steps

_NAME_START = re.compile(r"[^\W\d]")
_NAME = re.compile(r"[\w.\-/]*")
_KEY = re.compile(r"""[^\s=(),'"\[\]{}]*""")
_WORD = re.compile(r"[A-Za-z]*")
_NUMERIC = re.compile(r"[-+0-9.eE_]*")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_REAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_ESCAPE = re.compile(
    r"""\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U(?:0010|000[0-9A-Fa-f])[0-9A-Fa-f]{4}|[0-7]{1,3}|"""
    r"""[\nabfnrtv\\'"])"""
)
"""An escape that Python decodes. Any other backslash is an ordinary character."""
CONSTANTS: dict[str, Any] = {
    "True": True,
    "true": True,
    "False": False,
    "false": False,
    "None": None,
    "null": None,
}


def read_name(source: Source, pos: int) -> Steps[str]:
    """Return the name at `pos`, which may contain dots. Return "" if there is none."""
    char = yield from source.char(pos)
    return (yield from _run(source, pos, _NAME)) if _NAME_START.match(char) else ""


def read_call(source: Source, pos: int) -> Steps[tuple[str, dict[str, Any], int]]:
    """Return name and arguments of the call at `pos`, and its end. Raises `Unreadable`."""
    name = yield from read_name(source, pos)
    pos = yield from source.skip(pos + len(name))
    char = yield from source.char(pos)
    if not name or char != "(":
        raise _wrong(pos, char, "a function's name and '('")
    arguments = Members()
    pos = yield from source.skip(pos + 1)
    while (char := (yield from source.char(pos))) != ")":
        pos = yield from _argument(source, pos, arguments)
        pos = yield from source.skip(pos)
        char = yield from source.char(pos)
        if char == ",":
            pos = yield from source.skip(pos + 1)
        elif char != ")":
            raise _wrong(pos, char, "',' or ')'")
    return name, arguments.plain(), pos + 1


def _argument(source: Source, pos: int, arguments: dict[str, Any]) -> Steps[int]:
    if (yield from source.starts(pos, "**")):
        value, stop = yield from read_value(source, pos + 2, 1)
        if not isinstance(value, dict) or isinstance(value, Members):
            raise Unreadable(pos, "** must unpack a dictionary without repeated keys")
        for key, item in value.items():
            arguments[key] = item
        return stop
    key = yield from _run(source, pos, _KEY)
    equals = yield from source.skip(pos + len(key))
    char = yield from source.char(equals)
    if not key or char != "=":
        if not char:
            raise _wrong(equals, char, "")
        raise Unreadable(pos, "every argument must be given by its name, as in name=value")
    start = yield from source.skip(equals + 1)
    arguments[key], stop = yield from read_value(source, start, 1)
    return stop


def read_value(source: Source, pos: int, depth: int = 0) -> Steps[tuple[Any, int]]:
    """Return the literal at `pos` (after white space), and its end. Raises `Unreadable`."""
    pos = yield from source.skip(pos)
    char = yield from source.char(pos)
    if depth > MAX_DEPTH:
        raise Unreadable(pos, f"nested more than {MAX_DEPTH} deep")
    if char in ("'", '"'):
        return (yield from _string(source, pos, char))
    if char == "{":
        return (yield from _dictionary(source, pos, depth))
    if char in ("[", "("):
        return (yield from _sequence(source, pos, "]" if char == "[" else ")", depth))
    if char and (char in "+-." or char.isdigit()):
        return (yield from _number(source, pos))
    word = yield from _run(source, pos, _WORD)
    if word in CONSTANTS:
        return CONSTANTS[word], pos + len(word)
    if word in ("r", "u", "R", "U") and (yield from source.char(pos + 1)) in ("'", '"'):
        quote = yield from source.char(pos + 1)
        return (yield from _string(source, pos + 1, quote, raw=word in "rR"))
    cut = pos + len(word) == len(source.text) and any(name.startswith(word) for name in CONSTANTS)
    raise Unreadable(
        pos,
        "expected a value: a string in quotes, a number, a list, a dictionary, True, False or None",
        incomplete=cut,
    )


def _run(source: Source, pos: int, pattern: re.Pattern[str]) -> Steps[str]:
    """Return the text at `pos` that matches `pattern`, a repeated character class."""
    stop = yield from source.run(pos, pattern)
    return source.text[pos:stop]


def _wrong(pos: int, char: str, missing: str) -> Unreadable:
    return Unreadable(
        pos, f"expected {missing}" if char else "the text ends inside the call", incomplete=not char
    )


def _number(source: Source, pos: int) -> Steps[tuple[Any, int]]:
    text = yield from _run(source, pos, _NUMERIC)
    stop = pos + len(text)
    try:
        if _INTEGER.fullmatch(text):
            return int(text), stop
        if _REAL.fullmatch(text) and math.isfinite(value := float(text)):
            return value, stop
    except ValueError:
        pass  # an integer with more digits than Python accepts
    raise Unreadable(pos, f"{text[:40]} is not a number", incomplete=stop == len(source.text))


def _string(source: Source, pos: int, quote: str, *, raw: bool = False) -> Steps[tuple[str, int]]:
    triple = yield from source.starts(pos, quote * 3)
    start = pos = pos + (3 if triple else 1)
    end = triple or quote
    if source.is_absent(end, start):
        raise Unreadable(start, "the text ends inside a string", incomplete=True)
    while True:
        pos = yield from source.run(pos, _PLAIN[quote])
        char = yield from source.char(pos)
        if not char or (char == "\\" and not (yield from source.char(pos + 1))):
            source.set_absent(end, start)
            raise Unreadable(pos, "the text ends inside a string", incomplete=True)
        if char == "\\":
            pos += 2
        elif (yield from source.starts(pos, end)) and (yield from _closes(source, pos + len(end))):
            body = source.text[start:pos]
            return (body if raw or "\\" not in body else _unescaped(body)), pos + len(end)
        elif char == quote:
            pos += 1


def _closes(source: Source, pos: int) -> Steps[bool]:
    """Return True if the text at `pos`, directly after a quote, can follow a value."""
    behind = yield from source.skip(pos)
    char = yield from source.char(behind)
    return bool(char) and char in ",)]}:"


def _unescaped(text: str) -> str:
    value = _ESCAPE.sub(_character, text)
    if any("\ud800" <= char <= "\udfff" for char in value):
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _character(match: re.Match[str]) -> str:
    escape = match.group()
    if escape[1] in "01234567":
        return chr(int(escape[1:], 8))  # the codec warns of those above 0o377
    return codecs.decode(escape, "unicode_escape")


def _sequence(source: Source, pos: int, end: str, depth: int) -> Steps[tuple[list[Any], int]]:
    items: list[Any] = []
    pos = yield from source.skip(pos + 1)
    while (yield from source.char(pos)) != end:
        value, pos = yield from read_value(source, pos, depth + 1)
        items.append(value)
        pos = yield from _next(source, pos, end)
    return items, pos + 1


def _dictionary(source: Source, pos: int, depth: int) -> Steps[tuple[dict[str, Any], int]]:
    entries = Members()
    pos = yield from source.skip(pos + 1)
    while (yield from source.char(pos)) != "}":
        key, pos = yield from read_value(source, pos, depth + 1)
        if isinstance(key, (dict, list)):
            raise Unreadable(pos, "a dictionary's key must be a string")
        pos = yield from source.skip(pos)
        char = yield from source.char(pos)
        if char != ":":
            raise _wrong(pos, char, "':' after the key")
        entries[key if isinstance(key, str) else str(key)], pos = yield from read_value(
            source, pos + 1, depth + 1
        )
        pos = yield from _next(source, pos, "}")
    return entries.plain(), pos + 1


def _next(source: Source, pos: int, end: str) -> Steps[int]:
    """Return the position of the next item, or of `end`."""
    pos = yield from source.skip(pos)
    char = yield from source.char(pos)
    if char == ",":
        return (yield from source.skip(pos + 1))
    if char != end:
        raise _wrong(pos, char, f"',' or '{end}'")
    return pos


def python_value(text: str) -> tuple[bool, Any]:
    """Return (True, value) if all of `text` is a Python literal. Otherwise return False and an
    undefined value.
    """
    source = Source()
    source.feed(text, None)
    source.closed = True
    steps = read_value(source, 0)
    try:
        while True:
            next(steps)
    except Unreadable:
        return False, None
    except StopIteration as done:
        value, stop = done.value
        return not text[stop:].strip(), value
