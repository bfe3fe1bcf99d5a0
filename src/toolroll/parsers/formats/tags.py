"""`TagParser`: the base class for formats with tags. A call is a tag with the tool's name. In it,
each parameter is a tag with a key, and its value is bare text.

Qwen3-Coder, GLM, MiniMax, DeepSeek 3.2 and similar formats differ in their markers, which `Shape`
lists.

Invariants: a value ends at the first closing marker that is followed by another parameter or by the
end of the call. So a value may contain the format's own tags. The search for this marker stops
where the call and its block end, so a value that is never closed does not hide the next call. If a
value contains the start tag of a parameter but not its end tag, the value was probably never
closed, so the call is unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from toolroll.parsers.base import Broken
from toolroll.parsers.formats.blocks import BlockParser, json_arguments
from toolroll.parsers.reading.json_text import Members, decode, made_call
from toolroll.parsers.reading.resolve import Schema
from toolroll.parsers.reading.schema import parameter
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reading.values import guess_value, value_by_schema
from toolroll.parsers.types import ToolCall

_NO_NAME = re.compile(r"""[{}"'<>\n]""")
_KEY = r"([\w.\-]{1,100}+)"


@dataclass(frozen=True, slots=True)
class Shape:
    """The markers of one format.

    Attributes:
        block: The start and end markers of all calls together, or None if there is no block.
        call: The start and end markers of a call.
        name_end: The markers that end the name. The first only ends the name. Each of the others
            is also the start of the text after the name.
        key: The start and end markers of a parameter's key.
        value: The start and end markers of a value. The start marker is "" if the value directly
            follows the key's end marker.
        kind: The start and end markers of the value's JSON type, which may follow the key. None if
            the format has no types.
        typed_by: The start of the attribute that follows a key and says whether the value is a
            string, and the attribute's value for a string.
        json_body: True if a JSON object may replace the parameters.
        trim_newline: True if a value may be on lines of its own. If a line break precedes the
            value, this line break and one after the value belong to the markers.
        self_closing: The marker that ends both the name and the call if there are no parameters.
        attribute_end: The text that ends the name if attributes follow it.
        attribute: A function that decodes the escapes in the name and in a key.
        unescape: A function that decodes the escapes in a value.
    """

    block: tuple[str, str] | None
    call: tuple[str, str]
    name_end: tuple[str, ...]
    key: tuple[str, str]
    value: tuple[str, str]
    kind: tuple[str, str] | None = None
    trim_newline: bool = False
    typed_by: tuple[str, str] | None = None
    json_body: bool = False
    self_closing: str = ""
    attribute_end: str = ""
    attribute: Callable[[str], str] = str
    unescape: Callable[[str], str] | None = None


class TagParser(BlockParser):
    """A parser for the format that `shape` describes."""

    shape: ClassVar[Shape]
    _name_ends: ClassVar[tuple[str, ...]]
    _call_ends: ClassVar[tuple[str, ...]]
    _name_guards: ClassVar[tuple[str, ...]]
    _ways_out: ClassVar[tuple[str, ...]]
    _start_tag: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        shape = cls.shape
        cls.block, cls.call = shape.block, shape.call
        self_closing = (shape.self_closing,) if shape.self_closing else ()
        cls._name_ends = (*shape.name_end, *self_closing)
        cls._call_ends = (shape.call[1], *self_closing)
        guards = (*cls._name_ends, "\n", *shape.call, shape.key[0], *(shape.block or ()))
        cls._name_guards = tuple(dict.fromkeys(guards))
        cls._ways_out = ()
        if shape.block is not None:
            cls._ways_out = tuple(f"{shape.call[1]}{gap}{shape.block[1]}" for gap in ("", "\n"))
        cls._start_tag = re.compile(_start_tag(shape))
        super().__init_subclass__()
        cls.beside = ((shape.call[0],), (shape.key[0],))
        cls.inner = tuple(filter(None, (*shape.key, *(shape.kind or ()), *shape.value)))

    def elements(self, source: Source, begin: int, start: int) -> Steps[tuple[list[ToolCall], int]]:
        name, body = yield from self._name(source, start)
        arguments, end, stop = yield from self._arguments(source, body, name)
        return [made_call(name, arguments, source.text[start:end], (begin, stop))], stop

    def _name(self, source: Source, start: int) -> Steps[tuple[str, int]]:
        shape = self.shape
        first = yield from source.skip(start)
        pos, marker = yield from source.until(first, self._name_guards)
        name = source.text[first:pos].strip()
        if marker not in self._name_ends:
            raise Broken(
                f"the tool's name is not closed with {shape.name_end[0]!r}"
                if marker
                else "the text ends before the tool's name is complete"
            )
        name = name.split(shape.attribute_end)[0] if shape.attribute_end else name
        if _NO_NAME.search(name):
            raise Broken(f"{name[:60]!r} is not a valid tool name")
        return shape.attribute(name), pos + len(marker) if marker == shape.name_end[0] else pos

    def _arguments(
        self, source: Source, pos: int, name: str
    ) -> Steps[tuple[dict[str, Any], int, int]]:
        """Read the text after the name, which starts at `pos`. Return the arguments, the position
        of the call's end marker, and the position after this marker.
        """
        shape = self.shape
        arguments = Members()
        while True:
            pos = yield from source.skip(pos)
            marker = yield from source.starts(pos, shape.key[0], *self._call_ends)
            if marker in self._call_ends:
                return arguments.plain(), pos, pos + len(marker)
            if marker == shape.key[0]:
                pos = yield from self._parameter(source, pos + len(marker), name, arguments)
            elif shape.json_body and not arguments and (yield from source.char(pos)) == "{":
                body, pos = yield from json_arguments(source, pos, name)
                if not isinstance(body, dict):
                    raise Broken(f"the arguments of {name} must be a JSON object", name)
                arguments = body if isinstance(body, Members) else Members(body.items())
            else:
                raise Broken(
                    f"expected {shape.key[0]} or {shape.call[1]} in the call of {name}", name
                )

    def _parameter(
        self, source: Source, start: int, name: str, arguments: dict[str, Any]
    ) -> Steps[int]:
        shape = self.shape
        pos, marker = yield from source.until(
            start, (shape.key[1], shape.call[1], shape.value[1], "\n")
        )
        key, is_string = source.text[start:pos].strip(), None
        if marker != shape.key[1]:
            raise Broken(
                f"a parameter's name in the call of {name} is not closed with {shape.key[1]}", name
            )
        pos += len(marker)
        if shape.typed_by is not None:
            key, attribute, kind = key.partition(shape.typed_by[0])
            if '"' in key:
                raise Broken(f"a parameter's name in the call of {name} has a quote", name)
            is_string = kind.lower() == shape.typed_by[1] if attribute else None
        key = shape.attribute(key)
        schema = parameter(source.offered, name, key)
        if shape.kind is not None:
            pos, schema = yield from self._kind(source, pos, shape.kind, key, name, schema)
        if shape.value[0]:
            pos = yield from source.skip(pos)
            if not (yield from source.starts(pos, shape.value[0])):
                raise Broken(f"expected {shape.value[0]} after the parameter {key} of {name}", name)
            pos += len(shape.value[0])
        exact = tuple(marker for marker in (shape.block or shape.call) if source.exact(marker))
        end, after_false_close = yield from source.closing(
            pos, shape.value[1], (shape.key[0], shape.call[1]), (*exact, *self._ways_out)
        )
        if end < 0:
            raise Broken(f"the parameter {key} of {name} is not closed with {shape.value[1]}", name)
        swallowed = source.group_between(self._start_tag, shape.key[0], after_false_close, end)
        if swallowed:
            raise Broken(
                f"the parameter {key} of {name} is not closed with {shape.value[1]} before the "
                f"parameter {swallowed}",
                name,
            )
        try:
            arguments[key] = self.value(source.text[pos:end], schema, is_string=is_string)
        except ValueError as error:
            problem = f"the parameter {key} of {name} is not marked as a string, and is not JSON"
            raise Broken(problem, name) from error
        return end + len(shape.value[1])

    def _kind(
        self,
        source: Source,
        pos: int,
        marks: tuple[str, str],
        key: str,
        name: str,
        schema: Schema | None,
    ) -> Steps[tuple[int, Schema | None]]:
        """Return the position after the optional type at `pos`, and the schema for the value.

        The schema for the value is `schema` if no type was written, or if `schema` allows only one
        type besides null. Otherwise it is a schema with the type that was written.
        """
        start = yield from source.skip(pos)
        if not (yield from source.starts(start, marks[0])):
            return pos, schema
        start += len(marks[0])
        stop, marker = yield from source.until(
            start, (marks[1], *self.shape.value, self.shape.call[1])
        )
        if marker != marks[1]:
            raise Broken(
                f"the type of the parameter {key} of {name} is not closed with {marks[1]}", name
            )
        kinds = schema.allowed.kinds if schema is not None else None
        if kinds is None or len(kinds - {"null", "number" if "integer" in kinds else ""}) > 1:
            schema = Schema({"type": source.text[start:stop].strip()})
        return stop + len(marker), schema

    def value(self, text: str, schema: Schema | None, *, is_string: bool | None) -> Any:
        """Return the value that a parameter's bare `text` represents.

        `is_string`: whether the parameter's attribute marks a string, or None if there is no
        attribute. Raises `ValueError` for quotes that are not JSON if it marks another type.
        """
        if self.shape.trim_newline and text.startswith("\n"):
            text = text[1:].removesuffix("\n")
        if self.shape.unescape is not None:
            text = self.shape.unescape(text)
        if is_string is None:
            return value_by_schema(text, schema)
        if is_string:
            return text
        bare = text.strip()
        return decode(bare) if bare[:1] in ("'", '"') else guess_value(bare)


def _start_tag(shape: Shape) -> str:
    """Return a pattern for the start of a parameter up to its value. Its group is the key."""
    first, last = map(re.escape, shape.key)
    attribute = rf'(?:{re.escape(shape.typed_by[0])}[^"\n]{{0,20}})?' if shape.typed_by else ""
    following = "|".join(re.escape(marks[0]) for marks in (shape.kind, shape.value) if marks)
    return rf"{first}{_KEY}{attribute}{last}(?=\s*+(?:{following}))"
