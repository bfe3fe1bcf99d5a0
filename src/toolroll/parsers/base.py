"""`ToolCallParser`: the text that the model wrote, taken apart, at once or as it comes.

Invariants: reading never raises for any text; nothing is lost (see `toolroll.parsers.types`);
`parse` equals `feed` and `close` at every split; a format's marker counts only if it is the real
control token, when ids are given and the vocabulary has it as one token; the time is linear in the
text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import name_in
from toolroll.parsers.reading.schema import Offered, ToolSchemas
from toolroll.parsers.reading.source import Source, Span, Steps
from toolroll.parsers.reasoning import THINK, Tags
from toolroll.parsers.types import CallStatus, Delta, ParsedReply, ToolCall

Tool = Mapping[str, Any]


class ToolCallParser(ABC):
    """One wire format. `control_tokens`: the texts that the vocabulary holds as single control
    tokens. `reasoning`: how the model writes its reasoning, if it is not the format's own way
    (None).

    A subclass gives `read_calls`, a generator that reads visible text and calls; see
    `toolroll.parsers.reading.source`.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    reasoning: Tags | None = THINK
    openers: tuple[str, ...] = ()
    """What begins a call, if that is certain: unclosed reasoning ends there."""
    markers: tuple[str, ...] = ()
    """The format's own markers: what a reply may hold besides reasoning, content and calls. None
    of them is content.
    """
    prose_has_no_markers: ClassVar[bool] = False
    """Whether a reply without any marker is visible text and nothing else: then it is not read
    at all. Most replies are.
    """

    def __init__(
        self, control_tokens: Collection[str] = (), *, reasoning: Tags | None = None
    ) -> None:
        self.control_tokens = frozenset(control_tokens)
        if reasoning is not None:
            self.reasoning = reasoning
        self._schemas = ToolSchemas()

    def parse(
        self,
        text: str,
        *,
        ids: Sequence[int] | None = None,
        offsets: Sequence[Span] | None = None,
        tools: Sequence[Tool] | None = None,
        in_reasoning: bool | None = None,
        calls_as_text: bool = False,
    ) -> ParsedReply:
        """Take `text` (without the stop token) apart.

        `offsets`: [start, stop) in characters for each of `ids`. `tools`: the tools that were
        offered; None checks neither names nor arguments. `in_reasoning`: True if the prompt opened
        the reasoning; None: not known. `calls_as_text`: the reply holds no calls; all text from the
        first one on is content, as it is written.
        """
        if self.prose_has_no_markers and not in_reasoning and not self._marked(text):
            check_offsets(ids, offsets)
            return ParsedReply(text.strip())
        stream = self.stream(tools=tools, in_reasoning=in_reasoning, calls_as_text=calls_as_text)
        stream.finish(text, ids=ids, offsets=offsets)
        return stream.reply

    def _marked(self, text: str) -> bool:
        thoughts = self.reasoning.markers if self.reasoning is not None else ()
        return any(marker in text for marker in (*self.openers, *self.markers, *thoughts))

    def stream(
        self,
        *,
        tools: Sequence[Tool] | None = None,
        in_reasoning: bool | None = None,
        calls_as_text: bool = False,
    ) -> ReplyStream:
        """A reader for one reply that comes in pieces: `feed` each, `close`, then `reply`;
        parameters as in `parse`.
        """
        return ReplyStream(
            self,
            None if tools is None else Offered(tools),
            in_reasoning=in_reasoning,
            calls_as_text=calls_as_text,
        )

    def check(self, call: ToolCall, offered: Offered) -> ToolCall:
        """`call` with its status against the tools that were offered."""
        return self._schemas.check(call, offered) if call.ok else call

    def read(
        self, source: Source, out: Collector, offered: Offered | None, *, in_reasoning: bool | None
    ) -> Steps[None]:
        """Read a whole reply: reasoning, then text and calls."""
        at = 0
        if self.reasoning is not None:
            at = yield from self.reasoning.read(
                source, out, self.openers, in_reasoning=in_reasoning
            )
        yield from self.read_calls(source, out, at, offered)

    @abstractmethod
    def read_calls(
        self, source: Source, out: Collector, at: int, offered: Offered | None
    ) -> Steps[None]:
        """Read the visible text and every attempted call from `at` to the end of `source`, and
        put them in `out`.
        """


class ReplyStream:
    """One reply, read as it comes. Not to be shared: one per reply."""

    def __init__(
        self,
        parser: ToolCallParser,
        offered: Offered | None,
        *,
        in_reasoning: bool | None,
        calls_as_text: bool = False,
    ) -> None:
        self._source = Source(parser.control_tokens)
        check = _Check(parser, offered, self._source)
        self._out = Collector(check, calls_as_text=calls_as_text)
        self._steps: Steps[None] | None = parser.read(
            self._source, self._out, offered, in_reasoning=in_reasoning
        )

    def feed(
        self, text: str, *, ids: Sequence[int] | None = None, offsets: Sequence[Span] | None = None
    ) -> list[Delta]:
        """Take the next piece in; what is certain now. `offsets` are counted from the piece's
        beginning, whole tokens then.
        """
        self._take(text, ids, offsets)
        self._run()
        return self._out.drain()

    def close(self) -> list[Delta]:
        """End the reply and return the text that was held back."""
        self._source.closed = True
        self._run()
        return self._out.drain()

    def finish(
        self, text: str, *, ids: Sequence[int] | None = None, offsets: Sequence[Span] | None = None
    ) -> list[Delta]:
        """`feed` the last piece and `close`, at once."""
        self._take(text, ids, offsets)
        return self.close()

    @property
    def reply(self) -> ParsedReply:
        """The reply; whole once the stream is closed."""
        return self._out.reply()

    def _take(self, text: str, ids: Sequence[int] | None, offsets: Sequence[Span] | None) -> None:
        if self._source.closed:
            raise ValueError("the stream is closed: take a new one for each reply")
        check_offsets(ids, offsets)
        self._source.feed(text, offsets)

    def _run(self) -> None:
        if self._steps is not None:
            for _ in self._steps:
                if not self._source.closed:
                    break
            else:
                self._steps = None
        self._out.verbatim(self._source.text)


def check_offsets(ids: Sequence[int] | None, offsets: Sequence[Span] | None) -> None:
    """Raises `ValueError` if there are more of one than of the other."""
    if ids is not None and offsets is not None and len(ids) != len(offsets):
        raise ValueError(
            f"{len(ids)} ids have {len(offsets)} offsets: give one [start, stop) for each id"
        )


class _Check:
    """Gives a call the status that it has among the others and against the tools, and its tokens.
    An object of its own: a method of the stream, held by the stream's collector, would make garbage
    of every reply that reference counts do not free."""

    def __init__(self, parser: ToolCallParser, offered: Offered | None, source: Source) -> None:
        self._parser = parser
        self._offered = offered
        self._source = source
        self._seen: set[str] = set()

    def __call__(self, call: ToolCall) -> ToolCall:
        done = self._parser.check(call, self._offered) if self._offered is not None else call
        if done.id:
            if done.ok and done.id in self._seen:
                done = replace(
                    done,
                    status=CallStatus.DUPLICATE_ID,
                    error=f"the call id {done.id!r} was used twice",
                )
            self._seen.add(done.id)
        tokens = self._source.tokens(done.span) if done.span is not None else None
        return done if tokens is None else replace(done, token_span=tokens)


def broken_call(
    source: Source,
    begin: int,
    start: int,
    problem: str,
    *,
    closes: tuple[str, ...],
    openers: tuple[str, ...],
    name: str = "",
) -> Steps[tuple[ToolCall, int]]:
    """A call, begun at `begin`, that cannot be read because of `problem`, and where the text goes
    on; `raw` begins at `start`.

    It ends after the next of `closes`, or before the next of `openers`, or with the text; the last
    two leave it unclosed.
    """
    at, marker = yield from source.until(start, (*closes, *openers))
    raw = source.text[start:at]
    known = name or name_in(raw)
    if marker in closes:
        stop = at + len(marker)
        return ToolCall(
            known, None, raw, CallStatus.INVALID_JSON, problem, span=(begin, stop)
        ), stop
    return never_closed(known, raw, (begin, at), closes[0]), at


def never_closed(name: str, raw: str, span: Span, close: str) -> ToolCall:
    """Return a call that cannot be read and that the marker `close` does not end."""
    error = f"the reply ended inside the tool call: it is not closed with {close}"
    return ToolCall(name, None, raw, CallStatus.UNCLOSED, error, span=span)


def unclosed(call: ToolCall, close: str) -> ToolCall:
    """`call`, readable as far as it goes, but without the marker `close` at its end."""
    if not call.ok:
        return call
    return replace(
        call, status=CallStatus.UNCLOSED, error=f"the tool call is not closed with {close}"
    )
