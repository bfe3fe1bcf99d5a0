"""`ToolCallParser`: parses the text that the model wrote, at once or as a stream.

Invariants:

- Parsing never raises an error, whatever the text is, and loses no text (see
  `toolroll.parsers.types`).
- `parse` returns the same result as `feed` and `close`, however the text is split into pieces.
- If offsets are given and a marker is one control token of the vocabulary, only that token counts
  as the marker.
- The time is linear in the length of the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import name_in
from toolroll.parsers.reading.lookalike import Beside
from toolroll.parsers.reading.schema import Offered
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reasoning import THINK, Calls, Tags
from toolroll.parsers.types import CallStatus, Delta, ParsedReply, Span, ToolCall

OfferedTool = Mapping[str, Any]
OfferedTools = Sequence[OfferedTool] | Offered
"""The tools that were offered, in OpenAI's format. An `Offered` is not built again for each reply.
"""


class ToolCallParser(ABC):
    """A parser for one wire format: the syntax in which a model writes tool calls.

    A subclass implements `read_calls`, a generator that reads visible text and calls; see
    `toolroll.parsers.reading.source`.

    Args:
        control_tokens: The control tokens of the vocabulary, as texts.
        reasoning: The tags around the model's reasoning. Default: the tags of the format.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    reasoning: Tags | None = THINK
    openers: tuple[str, ...] = ()
    """The markers that always start a call. Reasoning that is not closed ends before the first."""
    markers: tuple[str, ...] = ()
    """The format's own markers. They are never content."""
    inner: tuple[str, ...] = ()
    """Further markers, inside calls."""
    beside: Beside = ((), ())
    """The markers that precede the name of a tool, and those that follow it. If the text of a reply
    contains them with the name of a tool, it looks like a call."""

    def __init__(
        self, control_tokens: Collection[str] = (), *, reasoning: Tags | None = None
    ) -> None:
        self.control_tokens = frozenset(control_tokens)
        if reasoning is not None:
            self.reasoning = reasoning

    def parse(
        self,
        text: str,
        *,
        ids: Sequence[int] | None = None,
        offsets: Sequence[Span] | None = None,
        tools: OfferedTools | None = None,
        in_reasoning: bool | None = None,
        calls_as_text: bool = False,
    ) -> ParsedReply:
        """Parse a whole reply.

        Args:
            text: The reply, without the stop token.
            ids: The token ids of `text`.
            offsets: For each of `ids`, its character range `[start, stop)` in `text`.
            tools: The tools that were offered. If it is None, names and arguments are not checked.
            in_reasoning: True if the prompt opened the reasoning, False if it did not, None if this
                is unknown.
            calls_as_text: If True, return no calls: all text from the first call on is content.
        """
        stream = self.stream(tools=tools, in_reasoning=in_reasoning, calls_as_text=calls_as_text)
        stream.finish(text, ids=ids, offsets=offsets)
        return stream.reply

    def stream(
        self,
        *,
        tools: OfferedTools | None = None,
        in_reasoning: bool | None = None,
        calls_as_text: bool = False,
    ) -> ReplyStream:
        """Return a stream for one reply. Call `feed` with each piece, then call `close`, then read
        `reply`. The parameters are the same as for `parse`.
        """
        return ReplyStream(
            self,
            tools if tools is None or isinstance(tools, Offered) else Offered(tools),
            in_reasoning=in_reasoning,
            calls_as_text=calls_as_text,
        )

    def read(self, source: Source, out: Collector, *, in_reasoning: bool | None) -> Steps[None]:
        """Read a whole reply from `source` into `out`: the reasoning, then text and calls."""
        pos = 0
        if self.reasoning is not None:
            calls = Calls(self.openers, partial(self._skip_calls, source))
            pos = yield from self.reasoning.read(source, out, calls, in_reasoning=in_reasoning)
        yield from self.read_calls(source, out, pos)

    def _skip_calls(self, source: Source, begin: int, start: int) -> Steps[int]:
        """Return the position after the calls of the opener from `begin` to `start`. If they cannot
        be read, return `start`.
        """
        scratch = Collector(source, None)
        stop = yield from self.read_marked(source, scratch, begin, start)
        calls = scratch.reply().tool_calls
        return stop if calls and all(call.arguments is not None for call in calls) else start

    @abstractmethod
    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        """Read `source` from `pos` to its end. Add the visible text and every call, even an
        unreadable one, to `out`.
        """

    def read_marked(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        """Add the calls after the opener, which is the text from `begin` to `start`. Return the
        position after the calls. A parser without `openers` needs no such method.
        """
        yield from ()
        return start


class MarkedParser(ToolCallParser):
    """A parser for formats in which every call starts with one of `openers`.

    Attributes:
        wrappers: The markers around visible text. They are skipped.
    """

    wrappers: ClassVar[tuple[str, ...]] = ()

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        markers = (*self.openers, *self.wrappers)
        while True:
            begin, marker = yield from source.until(pos, markers, out.content)
            if not marker:
                return
            if marker in self.wrappers:
                pos = begin + len(marker)
            elif out.calls_as_text:
                return out.begin_verbatim(begin)
            else:
                pos = yield from self.read_marked(source, out, begin, begin + len(marker))

    @abstractmethod
    def read_marked(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        """Add the calls after the opener. Return the position after them."""


class ReplyStream:
    """One reply that arrives in pieces. Create one per reply."""

    def __init__(
        self,
        parser: ToolCallParser,
        offered: Offered | None,
        *,
        in_reasoning: bool | None,
        calls_as_text: bool = False,
    ) -> None:
        self._source = Source(parser.control_tokens, offered)
        self._out = Collector(
            self._source,
            None if calls_as_text else offered,
            calls_as_text=calls_as_text,
            beside=parser.beside,
            markers=(*parser.markers, *parser.inner),
        )
        self._steps = parser.read(self._source, self._out, in_reasoning=in_reasoning)

    def feed(
        self, text: str, *, ids: Sequence[int] | None = None, offsets: Sequence[Span] | None = None
    ) -> list[Delta]:
        """Add the next piece of text. Return the deltas that no later text can change.

        `offsets` are relative to the piece. With offsets, each piece must consist of whole tokens.
        """
        self._take(text, ids, offsets)
        self._run()
        return self._out.drain()

    def close(self) -> list[Delta]:
        """End the reply. Return the deltas that `feed` held back."""
        self._source.closed = True
        self._run()
        return self._out.drain()

    def finish(
        self, text: str, *, ids: Sequence[int] | None = None, offsets: Sequence[Span] | None = None
    ) -> list[Delta]:
        """Add the last piece and end the reply: `feed` and `close` in one call."""
        self._take(text, ids, offsets)
        return self.close()

    @property
    def reply(self) -> ParsedReply:
        """The reply. It is complete after `close`."""
        return self._out.reply()

    def _take(self, text: str, ids: Sequence[int] | None, offsets: Sequence[Span] | None) -> None:
        if self._source.closed:
            raise ValueError("the stream is closed: create a new one for each reply")
        if ids is not None and offsets is not None and len(ids) != len(offsets):
            raise ValueError(
                f"{len(ids)} ids have {len(offsets)} offsets: give one [start, stop) for each id"
            )
        self._source.feed(text, offsets)

    def _run(self) -> None:
        for _ in self._steps:
            if not self._source.closed:
                break
        self._out.verbatim(self._source.text)


class Broken(Exception):
    """A call cannot be read. `name` is the tool's name, or "" if it is unknown. `incomplete`: True
    if the text ended inside the arguments.
    """

    def __init__(self, problem: str, name: str = "", *, incomplete: bool = False) -> None:
        super().__init__(problem)
        self.name = name
        self.incomplete = incomplete


def broken_call(
    source: Source,
    begin: int,
    start: int,
    broken: Broken,
    *,
    closes: tuple[str, ...],
    openers: tuple[str, ...],
) -> Steps[tuple[ToolCall, int]]:
    """Return an unreadable call that starts at `begin`, and the position after the call.

    `broken` becomes the call's error. The `raw` text starts at `start`. The call ends after one of
    `closes`, before one of `openers`, or at the end of the text, whichever comes first. If it
    does not end after one of `closes`, its status is UNCLOSED.
    """
    pos, marker = yield from source.until(start, (*closes, *openers))
    raw = source.text[start:pos]
    name = broken.name or name_in(raw)
    if marker in closes:
        stop = pos + len(marker)
        status, span = CallStatus.INVALID_JSON, (begin, stop)
        return ToolCall(name, None, raw, status, str(broken), span=span), stop
    return never_closed(name, raw, (begin, pos), closes[0]), pos


def never_closed(name: str, raw: str, span: Span, close: str) -> ToolCall:
    """Return an unreadable call whose end marker `close` is missing."""
    error = f"the reply ended inside the tool call: it is not closed with {close}"
    return ToolCall(name, None, raw, CallStatus.UNCLOSED, error, span=span)


def unclosed(call: ToolCall, close: str) -> ToolCall:
    """Return `call` with the status UNCLOSED, because its end marker `close` is missing. If `call`
    already has an error, return it unchanged.
    """
    return call.failed(CallStatus.UNCLOSED, f"the tool call is not closed with {close}")


class PlainParser(ToolCallParser):
    """Reads no calls: all text after the reasoning is content. Use it if the server parses the
    calls itself, or if the model makes no calls.
    """

    name = "plain"

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        """Read all text as content."""
        while True:
            out.content(source.text[pos:])
            pos = len(source.text)
            if source.closed:
                return
            yield
