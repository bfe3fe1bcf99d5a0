"""`BlockParser`: the base class of most parsers. Each call has a start marker and an end marker. In
most formats, a block with its own markers encloses the calls.

Invariants: the calls of a block are read one by one, and an unreadable call does not hide other
calls. Text between calls is content. If a block has no end marker, its last call is unclosed. A
block that contains only white space is not a call.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from toolroll.parsers.base import Broken, MarkedParser, broken_call, unclosed
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Unreadable, decode, made_call, scan_json
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.types import ToolCall


class BlockParser(MarkedParser):
    """A parser for formats in which each call has a start marker and an end marker.

    Attributes:
        block: The start and end markers of a block of calls, or None if calls have no block.
        call: The start and end markers of a call.
        bare: True if calls are also read outside a block.
    """

    block: ClassVar[tuple[str, str] | None] = None
    call: ClassVar[tuple[str, str]]
    bare: ClassVar[bool] = False
    _outer: ClassVar[tuple[str, str]]
    _closes: ClassVar[tuple[str, ...]]
    _stops: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "call" in vars(cls):
            first = (cls.block[0],) if cls.block is not None else ()
            cls.openers = (*first, cls.call[0]) if cls.bare or not first else first
            if "markers" not in vars(cls):
                cls.markers = (*(cls.block or ()), *cls.call, *cls.wrappers)
            cls.beside = ((cls.call[0],), ())
            cls._outer = cls.block or cls.call
            cls._closes = tuple(dict.fromkeys((cls.call[1], cls._outer[1])))
            cls._stops = tuple(dict.fromkeys((cls._outer[0], cls.call[0])))

    @abstractmethod
    def elements(self, source: Source, begin: int, start: int) -> Steps[tuple[list[ToolCall], int]]:
        """Return the calls between the call markers, the first of which ends at `start`, and the
        position after the end marker. Some formats have several calls there.

        The calls' span starts at `begin`. Raises `Broken` if the calls cannot be read.
        """

    def read_marked(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        if self.block is not None and source.text[begin:start] == self.block[0]:
            return (yield from self._block(source, out, begin, begin))
        calls, pos = yield from self._element(source, begin, begin)
        for call in calls:
            out.call(call)
        return pos

    def _block(self, source: Source, out: Collector, begin: int, pos: int) -> Steps[int]:
        """Add the calls of the block that starts at `pos`. Return the position after the block.

        `begin`: where the first call's span starts. It is `pos`, or the start of a header before
        the block (Muse).
        """
        opener, closer = self._outer
        last: ToolCall | None = None  # held back, because its span includes the block's end marker
        first = True
        opened = pos
        start = pos = pos + len(opener)
        while True:
            pos = yield from source.skip(pos)
            marker = yield from source.starts(pos, self.call[0], closer, opener)
            if marker == self.call[0]:
                if last is not None:
                    out.call(last)
                calls, pos = yield from self._element(source, begin if first else pos, pos)
                for call in calls[:-1]:
                    out.call(call)
                first, last = False, calls[-1] if calls[-1].arguments is not None else None
                if last is None:
                    out.call(calls[-1])
                    if source.text.startswith(closer, pos - len(closer)):
                        return pos
            elif first and marker == closer and self.block is not None and begin == opened:
                out.empty_block(source.text[begin : pos + len(closer)])
                return pos + len(closer)
            elif first and (marker or pos < len(source.text) or source.closed):
                broken = Broken(f"expected {self.call[0]} after {opener}")
                call, pos = yield from broken_call(
                    source, begin, start, broken, closes=(closer,), openers=(opener,)
                )
                out.call(call)
                return pos
            elif marker == closer:
                pos += len(closer)
                if last is not None:
                    out.call(replace(last, span=(last.span[0] if last.span else begin, pos)))
                return pos
            elif marker == opener or pos == len(source.text):
                if last is not None:
                    out.call(unclosed(last, closer))
                return pos
            else:
                if last is not None:
                    out.call(last)
                    last = None
                pos, _ = yield from source.until(pos, (self.call[0], closer, opener), out.content)

    def _element(self, source: Source, begin: int, pos: int) -> Steps[tuple[list[ToolCall], int]]:
        """Return the calls between the call markers that start at `pos`, and the position after
        them. If they cannot be read, return one unreadable call.

        `begin`: where the first call's span starts.
        """
        start = pos + len(self.call[0])
        try:
            return (yield from self.elements(source, begin, start))
        except Broken as broken:
            call, stop = yield from broken_call(
                source, begin, start, broken, closes=self._closes, openers=self._stops
            )
            return [call], stop


def json_arguments(
    source: Source, pos: int, name: str
) -> Steps[tuple[dict[str, object] | None, int]]:
    """Return the JSON value at `pos` (after white space), and where it ends. Raises `Broken` if it
    cannot be read. `name`: the tool's name, for the error message.
    """
    pos = yield from source.skip(pos)
    problem = f"the arguments of {name} are not valid JSON"
    try:
        stop = yield from scan_json(source, pos)
        return decode(source.text[pos:stop]), stop
    except Unreadable as error:
        character = error.pos - pos
        raise Broken(
            f"{problem}: {error} (character {character})", name, incomplete=error.incomplete
        ) from error
    except ValueError as error:
        raise Broken(f"{problem}: {error}", name) from error


class NamedJsonParser(BlockParser):
    """A parser for calls that consist of a name, a separator, and the arguments as JSON.

    `fence`: the markers around the JSON, if the format has them. The name is then between the
    separator and the fence.
    """

    separator: ClassVar[str]
    fence: ClassVar[tuple[str, str]] = ("", "")

    def elements(self, source: Source, begin: int, start: int) -> Steps[tuple[list[ToolCall], int]]:
        # start                                pos, once the arguments are read
        # | header  separator                  |
        # | header  separator  name  fence[0]  {JSON}  fence[1]  call[1]
        #
        # Other markers before the separator mean that this call has none. The JSON may be missing,
        # and so may fence[1]. A marker inside the JSON is part of a string.
        guards = tuple(dict.fromkeys((self.separator, *self.call, *(self.block or ()))))
        pos, marker = yield from source.until(start, guards)
        if marker != self.separator:
            raise Broken(f"expected a name and {self.separator}")
        header = source.text[start:pos].strip()
        pos += len(marker)
        if self.fence[0]:
            pos, header = yield from self._fenced(source, pos)
        name, call_id = self.name_of(header)
        empty = yield from source.skip(pos)
        arguments: object = {}
        if not (yield from source.starts(empty, self.call[1], spelled=True)):
            arguments, pos = yield from json_arguments(source, pos, name)
        pos = yield from source.skip(pos)
        if self.fence[1] and (yield from source.starts(pos, self.fence[1])):
            pos = yield from source.skip(pos + len(self.fence[1]))
        if not (yield from source.starts(pos, self.call[1], spelled=True)):
            raise Broken(
                f"the call of {name} is not closed with {self.call[1]} after its arguments", name
            )
        stop = pos + len(self.call[1])
        call = made_call(name, arguments, source.text[start:pos], (begin, stop))
        return [call.with_id(call_id)], stop

    def _fenced(self, source: Source, pos: int) -> Steps[tuple[int, str]]:
        """Read the name and the fence at `pos`. Return where the JSON starts, and the name."""
        start = pos
        pos, marker = yield from source.until(pos, (self.fence[0], *self.call))
        name = source.text[start:pos].strip()
        if marker != self.fence[0]:
            raise Broken(
                f"expected {self.fence[0]} and the arguments after the name",
                name.split("\n")[0][:100],
            )
        return pos + len(marker), name

    def name_of(self, header: str) -> tuple[str, str]:
        """Return the tool's name and the call's id from the text before the separator."""
        return header, ""
