"""MiniMax M2 and dots: a block of `<invoke name="...">` with a `<parameter name="...">` for each
argument. Also MiniCPM 5, which has `<function name=...>` and `<param name=...>` without a block.
Also MiniMax M3, which has an element named after its key for each argument.

In MiniMax M3, objects and arrays are nested elements (array items are `<item>`). A mark, the token
`]<]minimax[>[`, precedes every tag. Invariants: a tag without the mark is text. The content of an
element is decoded with the tool's schema, level by level. Without a schema, elements that are all
named `item` are an array. Source: SGLang 0.5.23 (minimax_m3).
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field, replace
from typing import Any

from toolroll.parsers.base import Broken
from toolroll.parsers.formats.blocks import BlockParser
from toolroll.parsers.formats.tags import Shape, TagParser
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import MAX_DEPTH, made_call
from toolroll.parsers.reading.resolve import Schema
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reading.values import value_by_schema
from toolroll.parsers.reasoning import get_reasoning
from toolroll.parsers.types import ToolCall

_MINIMAX = Shape(
    block=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=('<invoke name="', "</invoke>"),
    name_end=('">',),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
)


def _unwrapped(text: str) -> str:
    """Return the content of `text` if it is a CDATA section. Otherwise return `text` with HTML
    escapes decoded.
    """
    bare = text.strip()
    if bare.startswith("<![CDATA[") and bare.endswith("]]>"):
        return bare[9:-3]
    return html.unescape(text)


class MiniMaxM2Parser(TagParser):
    """The format of MiniMax M2, which the module describes."""

    name = "minimax-m2"
    shape = _MINIMAX


class DotsParser(TagParser):
    """The format of dots, which the module describes."""

    name = "dots"
    shape = replace(_MINIMAX, block=("<dots_function_call>", "</dots_function_call>"))


class MiniCPM5Parser(TagParser):
    """The format of MiniCPM 5, which the module describes."""

    name = "minicpm5"
    shape = Shape(
        block=None,
        call=('<function name="', "</function>"),
        name_end=('">',),
        key=('<param name="', '">'),
        value=("", "</param>"),
        unescape=_unwrapped,
    )


_MARK = "]<]minimax[>["
_OPEN, _END = "<tool_call>", "</invoke>"
_ITEM = "item"


class MiniMaxM3Parser(BlockParser):
    """The format of MiniMax M3, which the module describes. White space is allowed between the mark
    and `<tool_call>`, and before an argument's tag.
    """

    name = "minimax-m3"
    block = (f"{_MARK}{_OPEN}", f"{_MARK}</tool_call>")
    call = (f'{_MARK}<invoke name="', f"{_MARK}{_END}")
    # The mark and the tag are separate markers, because no vocabulary has both as one token.
    markers = (_MARK, _OPEN, "</tool_call>")
    reasoning = get_reasoning("minimax-m3")

    def read(self, source: Source, out: Collector, *, in_reasoning: bool | None) -> Steps[None]:
        """A reply without reasoning may start with the tag that closes reasoning."""
        close = self.reasoning.close if self.reasoning is not None else ""
        lead = yield from source.skip(0)
        if close and in_reasoning is False and (yield from source.starts(lead, close)):
            yield from self.read_calls(source, out, lead + len(close))
        else:
            yield from super().read(source, out, in_reasoning=in_reasoning)

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        while True:
            begin, marker = yield from source.until(pos, (_MARK,), out.content)
            if not marker:
                return
            tag = yield from source.skip(begin + len(_MARK))
            if (yield from source.starts(tag, _OPEN)):
                if out.calls_as_text:
                    return out.begin_verbatim(begin)
                # `_block` expects no white space between the mark and the tag.
                pos = yield from self._block(source, out, begin, tag - len(_MARK))
            else:
                pos = begin + len(_MARK)

    def elements(self, source: Source, begin: int, start: int) -> Steps[tuple[list[ToolCall], int]]:
        pos, marker = yield from source.until(start, ('">', "\n", _MARK))
        name = source.text[start:pos]
        if marker != '">':
            raise Broken("the tool's name is not closed with '\">'")
        parameters = source.offered.parameters(name) if source.offered is not None else None
        root = _Holder(parameters.schema if parameters is not None else None)
        body = pos = pos + len(marker)
        while True:
            pos = yield from source.skip(pos)
            if not (yield from source.starts(pos, _MARK)):
                raise Broken(f"expected {_MARK} and a tag in the call of {name}", name)
            tag = yield from source.skip(pos + len(_MARK))
            if (yield from source.starts(tag, _END)):
                stop = tag + len(_END)
                return [made_call(name, root.members, source.text[body:pos], (begin, stop))], stop
            pos = yield from _element(source, tag, name, root, 0)


@dataclass(slots=True)
class _Holder:
    """Collects the elements of an object or an array: `values` by name, and `items` in order."""

    schema: Schema | None
    values: dict[str, list[Any]] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)

    def schema_of(self, key: str) -> Schema | None:
        """Return the schema of the next element, named `key`, or None if it is unknown."""
        if self.schema is None:
            return None
        item = self.schema.item(len(self.items)) if key == _ITEM else None
        return item or self.schema.member(key)

    def add(self, key: str, value: Any) -> None:
        """Add the value of the element `key`."""
        self.items.append(value)
        self.values.setdefault(key, []).append(value)

    @property
    def members(self) -> dict[str, Any]:
        """The values by name. Elements with the same name are a list."""
        return {key: items if len(items) > 1 else items[0] for key, items in self.values.items()}

    def value(self) -> Any:
        """Return `members` or `items`, as the schema requires. If the schema does not decide,
        elements that are all named `item` are an array.
        """
        kinds = _kinds(self.schema) & {"array", "object"}
        if len(kinds) == 1:
            return self.items if "array" in kinds else self.members
        return self.items if self.members.keys() == {_ITEM} else self.members


def _element(source: Source, pos: int, name: str, holder: _Holder, depth: int) -> Steps[int]:
    """Add the element whose tag is at `pos` to `holder`. Return the end of the closing tag. Raises
    `Broken`.
    """
    if depth >= MAX_DEPTH:
        raise Broken(f"the arguments of {name} are nested more than {MAX_DEPTH} deep", name)
    start = pos + 1
    pos, marker = yield from source.until(pos, (">", "\n", _MARK))
    key = source.text[start:pos].strip()
    if marker != ">" or source.text[start - 1] != "<" or not key or key[0] == "/":
        raise Broken(f"expected the tag of an argument, or {_END}, in the call of {name}", name)
    first = pos = pos + 1
    schema, child = holder.schema_of(key), None
    while True:
        pos, marker = yield from source.until(pos, (_MARK,))
        if not marker:
            raise Broken(f"the argument {key} of {name} is not closed with {_MARK}</{key}>", name)
        tag = yield from source.skip(pos + len(_MARK))
        closes = yield from source.starts(tag, f"</{key}>")
        if not closes and (yield from source.char(tag)) != "<":  # a mark without a tag is text
            pos += len(_MARK)
            continue
        if (child is not None or not closes) and source.text[first:pos].strip():
            raise Broken(
                f"there is text between the elements of the argument {key} of {name}", name
            )
        if closes:
            holder.add(
                key, _leaf(source.text[first:pos], schema) if child is None else child.value()
            )
            return tag + len(closes)
        child = child or _Holder(schema)
        first = pos = yield from _element(source, tag, name, child, depth + 1)


def _kinds(schema: Schema | None) -> frozenset[str]:
    return (schema.allowed.kinds if schema is not None else None) or frozenset()


def _leaf(text: str, schema: Schema | None) -> Any:
    """Return the value of an element's `text`. If the schema allows an array or an object but no
    string, empty text becomes an empty array or object.
    """
    kinds = _kinds(schema)
    if not text.strip() and "string" not in kinds and kinds & {"array", "object"}:
        return [] if "array" in kinds else {}
    return value_by_schema(text, schema)
