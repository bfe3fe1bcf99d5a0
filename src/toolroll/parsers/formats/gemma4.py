"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,n:1,list:[true,null]}<tool_call|>`.

Models also write strings and keys in the quotes of JSON or Python. Invariant: a quote is never part
of an unquoted value, so a string whose quotes do not match makes the call unreadable.
"""

from __future__ import annotations

import re
from typing import Any

from toolroll.parsers.base import Broken
from toolroll.parsers.formats.blocks import BlockParser, json_arguments
from toolroll.parsers.reading.json_text import MAX_DEPTH, Members, Unreadable, made_call
from toolroll.parsers.reading.python_text import read_value
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reading.values import guess_value
from toolroll.parsers.reasoning import get_reasoning
from toolroll.parsers.types import ToolCall

_QUOTE = '<|"|>'
_KEY = re.compile(r"[^:,{}\[\]<]*")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]<]*")


class Gemma4Parser(BlockParser):
    """The format of Gemma 4, which the module describes."""

    name = "gemma4"
    call = ("<|tool_call>", "<tool_call|>")
    inner = (_QUOTE,)
    reasoning = get_reasoning("gemma4")

    def elements(self, source: Source, begin: int, start: int) -> Steps[tuple[list[ToolCall], int]]:
        pos = yield from source.skip(start)
        if not (yield from source.starts(pos, "call:")):
            raise Broken('expected "call:" and the tool\'s name')
        pos += len("call:")
        brace, marker = yield from source.until(pos, ("{", *self.call))
        name = source.text[pos:brace].strip()
        if marker != "{":
            raise Broken("expected { after the tool's name", name)
        arguments, pos = yield from _object(source, brace, name, 0)
        pos = yield from source.skip(pos)
        if not (yield from source.starts(pos, self.call[1], spelled=True)):
            raise Broken(
                f"the call of {name} is not closed with {self.call[1]} after its arguments", name
            )
        stop = pos + len(self.call[1])
        return [made_call(name, arguments, source.text[start:pos], (begin, stop))], stop


def _object(source: Source, pos: int, name: str, depth: int) -> Steps[tuple[dict[str, Any], int]]:
    members = Members()
    pos = yield from source.skip(pos + 1)
    while (yield from source.char(pos)) != "}":
        key, pos = yield from _string(source, pos, name)
        if key is None:
            key, pos = yield from _word(source, pos, _KEY)
        pos = yield from source.skip(pos)
        if not key or (yield from source.char(pos)) != ":":
            raise Broken(f"expected a key and ':' in the arguments of {name}", name)
        members[key], pos = yield from _value(source, pos + 1, name, depth + 1)
        pos = yield from _next(source, pos, "}", name)
    return members.plain(), pos + 1


def _array(source: Source, pos: int, name: str, depth: int) -> Steps[tuple[list[Any], int]]:
    items: list[Any] = []
    pos = yield from source.skip(pos + 1)
    while (yield from source.char(pos)) != "]":
        value, pos = yield from _value(source, pos, name, depth + 1)
        items.append(value)
        pos = yield from _next(source, pos, "]", name)
    return items, pos + 1


def _value(source: Source, pos: int, name: str, depth: int) -> Steps[tuple[Any, int]]:
    pos = yield from source.skip(pos)
    if depth > MAX_DEPTH:
        raise Broken(f"the arguments of {name} are nested more than {MAX_DEPTH} deep", name)
    string, pos = yield from _string(source, pos, name)
    if string is not None:
        return string, pos
    char = yield from source.char(pos)
    if char == "{":
        return (yield from _object(source, pos, name, depth))
    if char == "[":
        return (yield from _array(source, pos, name, depth))
    word, pos = yield from _word(source, pos, _BARE)
    if not word:
        raise Broken(f"a value is missing in the arguments of {name}", name)
    if '"' in word or "'" in word:
        raise Broken(_unmatched(name), name)
    return guess_value(word), pos


def _string(source: Source, pos: int, name: str) -> Steps[tuple[str | None, int]]:
    """Return the string at `pos` and its end. Return None and `pos` if there is no quote."""
    if (yield from source.starts(pos, _QUOTE)):
        start = pos + len(_QUOTE)
        end, marker = yield from source.until(start, (_QUOTE,))
        if not marker:
            raise Broken(f"a string in the arguments of {name} is not closed with {_QUOTE}", name)
        return source.text[start:end], end + len(marker)
    char = yield from source.char(pos)
    if char == '"':
        return (yield from json_arguments(source, pos, name))  # type: ignore[return-value]
    if char == "'":
        try:
            string, stop = yield from read_value(source, pos)
        except Unreadable as error:
            raise Broken(f"a string in the arguments of {name} is wrong: {error}", name) from error
        if "'" not in _ESCAPED.sub("", source.text[pos + 1 : stop - 1]):
            return string, stop
        raise Broken(_unmatched(name), name)
    return None, pos


def _unmatched(name: str) -> str:
    return f"the quotes in the arguments of {name} do not match: use {_QUOTE}"


def _word(source: Source, pos: int, pattern: re.Pattern[str]) -> Steps[tuple[str, int]]:
    stop = yield from source.run(pos, pattern)
    return source.text[pos:stop].strip(), stop


def _next(source: Source, pos: int, end: str, name: str) -> Steps[int]:
    pos = yield from source.skip(pos)
    char = yield from source.char(pos)
    if char == ",":
        return (yield from source.skip(pos + 1))
    if char != end:
        raise Broken(f"expected ',' or '{end}' in the arguments of {name}", name)
    return pos
