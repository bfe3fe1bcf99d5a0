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

from toolroll.parsers.reading.json_text import MAX_DEPTH
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


class Unreadable(Exception):
    """The text at `at` is not a Python value. `incomplete`: True if the text ended there."""

    def __init__(self, at: int, problem: str, *, incomplete: bool = False) -> None:
        super().__init__(problem)
        self.at = at
        self.incomplete = incomplete


def read_name(source: Source, at: int) -> Steps[str]:
    """Return the name at `at`, which may contain dots. Return "" if there is none."""
    char = yield from source.char(at)
    return (yield from _run(source, at, _NAME)) if _NAME_START.match(char) else ""


def read_call(source: Source, at: int) -> Steps[tuple[str, dict[str, Any], int]]:
    """Return the name and the arguments of the call at `at`, and the call's end. Raises
    `Unreadable`.
    """
    name = yield from read_name(source, at)
    at = yield from source.skip(at + len(name))
    char = yield from source.char(at)
    if not name or char != "(":
        raise _wrong(at, char, "a function's name and '('")
    arguments: dict[str, Any] = {}
    at = yield from source.skip(at + 1)
    while (char := (yield from source.char(at))) != ")":
        at = yield from _argument(source, at, arguments)
        at = yield from source.skip(at)
        char = yield from source.char(at)
        if char == ",":
            at = yield from source.skip(at + 1)
        elif char != ")":
            raise _wrong(at, char, "',' or ')'")
    return name, arguments, at + 1


def _argument(source: Source, at: int, arguments: dict[str, Any]) -> Steps[int]:
    if (yield from source.starts(at, "**")):
        value, stop = yield from read_value(source, at + 2, 1)
        if not isinstance(value, dict):
            raise Unreadable(at, "** must unpack a dictionary")
        arguments.update(value)
        return stop
    key = yield from _run(source, at, _KEY)
    equals = yield from source.skip(at + len(key))
    char = yield from source.char(equals)
    if not key or char != "=":
        if not char:
            raise _wrong(equals, char, "")
        raise Unreadable(at, "every argument must be given by its name, as in name=value")
    start = yield from source.skip(equals + 1)
    arguments[key], stop = yield from read_value(source, start, 1)
    return stop


def read_value(source: Source, at: int, depth: int = 0) -> Steps[tuple[Any, int]]:
    """Return the literal at `at` (after white space), and the literal's end. Raises
    `Unreadable`.
    """
    at = yield from source.skip(at)
    char = yield from source.char(at)
    if depth > MAX_DEPTH:
        raise Unreadable(at, f"nested more than {MAX_DEPTH} deep")
    if char in ("'", '"'):
        return (yield from _string(source, at, char))
    if char == "{":
        return (yield from _dictionary(source, at, depth))
    if char in ("[", "("):
        return (yield from _sequence(source, at, "]" if char == "[" else ")", depth))
    if char and (char in "+-." or char.isdigit()):
        return (yield from _number(source, at))
    word = yield from _run(source, at, _WORD)
    if word in CONSTANTS:
        return CONSTANTS[word], at + len(word)
    if word in ("r", "u", "R", "U") and (yield from source.char(at + 1)) in ("'", '"'):
        quote = yield from source.char(at + 1)
        return (yield from _string(source, at + 1, quote, raw=word in "rR"))
    cut = at + len(word) == len(source.text) and any(name.startswith(word) for name in CONSTANTS)
    raise Unreadable(
        at,
        "expected a value: a string in quotes, a number, a list, a dictionary, True, False or None",
        incomplete=cut,
    )


def _run(source: Source, at: int, pattern: re.Pattern[str]) -> Steps[str]:
    """Return the text at `at` that matches `pattern`, a repeated character class."""
    stop = yield from source.run(at, pattern)
    return source.text[at:stop]


def _wrong(at: int, char: str, wanted: str) -> Unreadable:
    return Unreadable(
        at, f"expected {wanted}" if char else "the text ends inside the call", incomplete=not char
    )


def _number(source: Source, at: int) -> Steps[tuple[Any, int]]:
    text = yield from _run(source, at, _NUMERIC)
    stop = at + len(text)
    try:
        if _INTEGER.fullmatch(text):
            return int(text), stop
        if _REAL.fullmatch(text) and math.isfinite(value := float(text)):
            return value, stop
    except ValueError:
        pass  # an integer with more digits than Python accepts
    raise Unreadable(at, f"{text[:40]} is not a number", incomplete=stop == len(source.text))


def _string(source: Source, at: int, quote: str, *, raw: bool = False) -> Steps[tuple[str, int]]:
    triple = yield from source.starts(at, quote * 3)
    start = at = at + (3 if triple else 1)
    end = triple or quote
    if source.is_absent(end, start):
        raise Unreadable(start, "the text ends inside a string", incomplete=True)
    while True:
        at = yield from source.run(at, _PLAIN[quote])
        char = yield from source.char(at)
        if not char or (char == "\\" and not (yield from source.char(at + 1))):
            source.set_absent(end, start)
            raise Unreadable(at, "the text ends inside a string", incomplete=True)
        if char == "\\":
            at += 2
        elif (yield from source.starts(at, end)) and (yield from _closes(source, at + len(end))):
            inner = source.text[start:at]
            return (inner if raw or "\\" not in inner else _unescaped(inner)), at + len(end)
        elif char == quote:
            at += 1


def _closes(source: Source, at: int) -> Steps[bool]:
    """Return True if the text at `at`, directly after a quote, can follow a value."""
    behind = yield from source.skip(at)
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


def _sequence(source: Source, at: int, end: str, depth: int) -> Steps[tuple[list[Any], int]]:
    found: list[Any] = []
    at = yield from source.skip(at + 1)
    while (yield from source.char(at)) != end:
        value, at = yield from read_value(source, at, depth + 1)
        found.append(value)
        at = yield from _next(source, at, end)
    return found, at + 1


def _dictionary(source: Source, at: int, depth: int) -> Steps[tuple[dict[str, Any], int]]:
    found: dict[str, Any] = {}
    at = yield from source.skip(at + 1)
    while (yield from source.char(at)) != "}":
        key, at = yield from read_value(source, at, depth + 1)
        if isinstance(key, (dict, list)):
            raise Unreadable(at, "a dictionary's key must be a string")
        at = yield from source.skip(at)
        char = yield from source.char(at)
        if char != ":":
            raise _wrong(at, char, "':' after the key")
        found[key if isinstance(key, str) else str(key)], at = yield from read_value(
            source, at + 1, depth + 1
        )
        at = yield from _next(source, at, "}")
    return found, at + 1


def _next(source: Source, at: int, end: str) -> Steps[int]:
    """Return the position of the next item, or of `end`."""
    at = yield from source.skip(at)
    char = yield from source.char(at)
    if char == ",":
        return (yield from source.skip(at + 1))
    if char != end:
        raise _wrong(at, char, f"',' or '{end}'")
    return at


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
