"""Read JSON in a text that arrives in pieces. Find the end of a value, decode it, and convert it to
a call.

Invariants: a value ends where it ends for `json.JSONDecoder.raw_decode`. Text that `raw_decode`
rejects is rejected here too, and so are NaN, Infinity and numbers that exceed a double, because
JSON cannot represent them. A scan stops at the first wrong character, so scans that fail are short.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.types import CallStatus, Span, ToolCall

MAX_DEPTH = 100

_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMERIC = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_SURROGATE = re.compile(r"\\u[dD][89A-Fa-f]")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class Unreadable(Exception):
    """The text at `pos` is not a value. `incomplete`: True if the text ended there."""

    def __init__(self, pos: int, problem: str, *, incomplete: bool = False) -> None:
        super().__init__(problem)
        self.pos = pos
        self.incomplete = incomplete


def scan_json(source: Source, pos: int) -> Steps[int]:
    """Return the end of the JSON value at `pos` (after white space). Raises `Unreadable`."""
    if source.closed and not source.is_absent(_DECODER, pos):
        end = _whole(source.text, pos)
        if end is not None:
            return end
        # raw_decode counts all lines before an error. To keep the total time linear, it may fail
        # only once per reply.
        source.set_absent(_DECODER, pos)
    stack: list[str] = []
    expect = "value"
    while True:
        pos = yield from source.run(pos, _BLANK)
        char = yield from source.char(pos)
        if not char:
            raise _incomplete(pos)
        if expect == "after":
            if char == ",":
                pos, expect = pos + 1, "key" if stack[-1] == "{" else "value"
                continue
            if char == ("}" if stack[-1] == "{" else "]"):
                stack.pop()
                pos += 1
            else:
                kind = "object" if stack[-1] == "{" else "array"
                raise Unreadable(pos, f"expected ',' or the end of the {kind}")
        elif expect == "colon":
            if char != ":":
                raise Unreadable(pos, "expected ':' after the name")
            pos, expect = pos + 1, "value"
            continue
        elif expect in ("key", "first key"):
            if char == '"':
                pos, expect = (yield from _string(source, pos)), "colon"
                continue
            if char != "}" or expect == "key":
                raise Unreadable(pos, "expected a name in double quotes")
            stack.pop()
            pos += 1
        elif char in "{[":
            if len(stack) >= MAX_DEPTH:
                raise Unreadable(pos, f"nested more than {MAX_DEPTH} deep")
            stack.append(char)
            pos, expect = pos + 1, "first key" if char == "{" else "first value"
            continue
        elif char == "]" and expect == "first value":
            stack.pop()
            pos += 1
        else:
            pos = yield from _scalar(source, pos, char)
        if not stack:
            return pos
        expect = "after"


def read_json(source: Source, pos: int) -> Steps[tuple[Any, int]]:
    """Return the JSON value at `pos`, and its end. Raises `Unreadable`."""
    stop = yield from scan_json(source, pos)
    try:
        return decode(source.text[pos:stop]), stop
    except ValueError as error:
        raise Unreadable(stop, str(error)) from error


def _whole(text: str, pos: int) -> int | None:
    """Return the end of the value at `pos`, as found by the standard library's decoder in C.

    Return None if the decoder rejects the value, or if the value may be nested too deep. The caller
    must then scan the value character by character.
    """
    try:
        stop = int(_DECODER.raw_decode(text, pos)[1])
    except (ValueError, RecursionError):
        return None
    return stop if text.count("{", pos, stop) + text.count("[", pos, stop) <= MAX_DEPTH else None


def _incomplete(pos: int) -> Unreadable:
    return Unreadable(pos, "the text ends inside the JSON value", incomplete=True)


def _scalar(source: Source, pos: int, char: str) -> Steps[int]:
    if char == '"':
        return (yield from _string(source, pos))
    if char in _LITERALS:
        word = yield from source.starts(pos, _LITERALS[char])
        if word:
            return pos + len(word)
        if source.closed and _LITERALS[char].startswith(source.text[pos : pos + 5]):
            raise _incomplete(pos)
    elif char in "-0123456789":
        stop = yield from source.run(pos, _NUMERIC)
        number = _NUMBER.match(source.text, pos, stop)
        if number is not None:
            return number.end()
        if source.text[pos : pos + 2] == "-":
            raise _incomplete(pos)
    raise Unreadable(pos, "expected a JSON value")


def _string(source: Source, pos: int) -> Steps[int]:
    """Return the end of the string whose quote is at `pos`."""
    pos += 1
    while True:
        pos = yield from source.run(pos, _PLAIN)
        char = yield from source.char(pos)
        if not char:
            raise _incomplete(pos)
        if char == '"':
            return pos + 1
        if char == "\\":
            letter = yield from source.char(pos + 1)
            if not letter:
                raise _incomplete(pos)
            if letter == "u":
                last = yield from source.char(pos + 5)
                if not _HEX.match(source.text, pos + 2):
                    if not last:
                        raise _incomplete(pos)
                    raise Unreadable(pos, "expected four hexadecimal digits after \\u")
                pos += 6
            elif letter in '"\\/bfnrt':
                pos += 2
            else:
                raise Unreadable(pos, f"\\{letter} is not a valid JSON escape")
        elif char < " ":
            raise Unreadable(
                pos, "a control character (such as a line break) must be escaped inside a string"
            )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


class Members(dict[str, Any]):
    """An object as the model wrote it. `repeated`: a key that was written twice, or "". The last
    value of such a key counts.
    """

    repeated = ""

    def __init__(self, pairs: Iterable[tuple[str, Any]] = ()) -> None:
        for key, value in pairs:
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        self.repeated = key if key in self else self.repeated
        super().__setitem__(key, value)

    def plain(self) -> dict[str, Any]:
        """Return a `dict`, or the object itself if it repeats a key."""
        return self if self.repeated else dict(self)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    return members if len(members) == len(pairs) else Members(pairs).plain()


_DECODER = json.JSONDecoder(
    parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_members
)


def decode(text: str) -> Any:
    """Return the value of a JSON text.

    Raises `ValueError` if the JSON is not valid, if it is nested too deep, or if JSON cannot
    represent a value (a number out of range, half of a surrogate pair).
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error
    if text.count("{") + text.count("[") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _deeper(value: Any, depth: int) -> bool:
    """Return True if `value` is nested deeper than `depth`."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_deeper(item, depth - 1) for item in items)


@dataclass(frozen=True, slots=True)
class Names:
    """The keys that hold the name, the arguments and the id in a call object.

    Each tuple lists the accepted keys. If an object has several of them, the first in the tuple
    counts. If their arguments differ, the call is not ok.
    """

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    call_id: tuple[str, ...] = ()


DEFAULT_NAMES = Names()


def call_of(value: Any, raw: str, span: Span, names: Names = DEFAULT_NAMES) -> ToolCall:
    """Return the call that the decoded object `value` represents. Do not check the call against
    tools.
    """
    if not isinstance(value, dict):
        return ToolCall(
            "", None, raw, CallStatus.INVALID_JSON, "the tool call must be a JSON object", span=span
        )
    name = _first(value, names.name)
    call_id = _first(value, names.call_id)
    arguments = _first(value, names.arguments, {})
    call = made_call(name if isinstance(name, str) else "", arguments, raw, span)
    lost = [key for key in names.arguments if value.get(key) not in (None, arguments)]
    lost += [value.repeated] if isinstance(value, Members) else []
    call = unclear(call, f"the key {lost[0]!r} gives a second value" if lost else None)
    return call.with_id(call_id) if isinstance(call_id, str) else call


def unclear(call: ToolCall, problem: str | None) -> ToolCall:
    """Return `call`, or if it is ok and has a `problem`, a copy with the status bad_arguments."""
    error = f"the call of {call.name} is not clear: {problem}"
    return call if problem is None else call.failed(CallStatus.BAD_ARGUMENTS, error)


def json_calls(value: Any, raw: str, span: Span, names: Names = DEFAULT_NAMES) -> list[ToolCall]:
    """Return the calls that the decoded `value`, an object or a list of objects, represents."""
    items = value if isinstance(value, list) and value else [value]
    return [call_of(item, raw, span, names) for item in items]


def made_call(name: str, arguments: Any, raw: str, span: Span) -> ToolCall:
    """Return a call of `name` with decoded `arguments` (an object, or its JSON text; blank text is
    an empty object).
    """
    if isinstance(arguments, str):
        try:
            arguments = decode(arguments) if arguments.strip() else {}
        except ValueError:
            problem = "arguments must be a JSON object"
            return ToolCall(name, None, raw, CallStatus.INVALID_JSON, problem, span=span)
    if not name:
        fitting = arguments if isinstance(arguments, dict) else None
        return ToolCall(
            "", fitting, raw, CallStatus.MISSING_NAME, 'the tool call has no "name"', span=span
        )
    if not isinstance(arguments, dict):
        error = f"the arguments of {name} must be a JSON object, not {type(arguments).__name__}"
        return ToolCall(name, None, raw, CallStatus.BAD_ARGUMENTS, error, span=span)
    return ToolCall(name, arguments, raw, span=span)


def _first(value: dict[str, Any], names: tuple[str, ...], default: Any = None) -> Any:
    for name in names:
        if name in value:
            return value[name]
    return default


def name_in(raw: str) -> str:
    """Return the string after the key "name" in `raw`, the text of an unreadable call. This is the
    tool's name. Return "" if there is none.
    """
    parts = raw[:2000].partition('"name"')[2].split('"', 2)
    named = len(parts) == 3 and parts[0].strip() == ":" and len(parts[1]) < 100
    return parts[1] if named else ""
