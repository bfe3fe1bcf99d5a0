"""`Collector`: builds a reply, and the deltas of its stream, from what a parser reads.

Invariant: the joined deltas of one kind equal the reply's field of this kind. The content ends
without white space, and the reasoning without line breaks. So these characters are held back until
other text follows.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from toolroll.parsers.reading.json_text import Members, unclear
from toolroll.parsers.reading.lookalike import Beside, lookalike, lookalikes
from toolroll.parsers.reading.schema import Offered, check_call
from toolroll.parsers.reading.source import Source
from toolroll.parsers.types import CallStatus, Delta, ParsedReply, ToolCall


class _Trimmed:
    """Text that arrives in pieces, with `chars` (None: white space) stripped at both ends."""

    def __init__(self, chars: str | None) -> None:
        self._chars = chars
        self._held: list[str] = []
        self.parts: list[str] = []

    def add(self, text: str) -> str:
        """Add `text`. Return the new text that no later text can change, including text that was
        held back before.
        """
        body = text.rstrip(self._chars)
        if not body:
            self._held.append(text)
            return ""
        certain = "".join((*self._held, body))
        if not self.parts:
            certain = certain.lstrip(self._chars)
        self._held = [text[len(body) :]]
        self.parts.append(certain)
        return certain

    def __str__(self) -> str:
        return "".join(self.parts)


class Collector:
    """Collects reasoning, content and calls in the order in which they were written.

    Args:
        source: The text of the reply and the positions of its tokens.
        offered: The tools that were offered, or None if calls are not checked.
        calls_as_text: If True, all text from the first call on is content.
        beside: The markers beside the name of a tool, which help to find text that looks like a
            call.
        markers: The markers of the format. A call whose name or key contains one is not ok.
    """

    def __init__(
        self,
        source: Source,
        offered: Offered | None,
        *,
        calls_as_text: bool = False,
        beside: Beside = ((), ()),
        markers: tuple[str, ...] = (),
    ) -> None:
        self._source = source
        self._offered = offered
        self._ids: set[str] = set()
        self.calls_as_text = calls_as_text
        self._verbatim_at: int | None = None
        self._content = _Trimmed(None)
        self._reasoning = _Trimmed("\n")
        self._calls: list[ToolCall] = []
        self._beside = beside
        self._markup = _markup(markers)
        self._lookalikes: list[ToolCall] = []
        self._deltas: list[Delta] = []
        self.reasoning_closed = True

    def content(self, text: str) -> None:
        """Add visible text."""
        if self._verbatim_at is None:
            self._put("content", self._content.add(text))

    def reasoning(self, text: str) -> None:
        """Add a piece of reasoning."""
        if self._verbatim_at is None:
            self._put("reasoning", self._reasoning.add(text))

    def call(self, call: ToolCall) -> None:
        """Add a call, which may be unreadable, and set its token span. Change its status if it does
        not fit the offered tools, if its keys are not clear, or if an earlier call has the same id.
        """
        if self.calls_as_text:
            if call.span is None:
                self.content(call.raw)
            else:
                self.begin_verbatim(call.span[0])
            return
        done = call if self._offered is None else check_call(call, self._offered)
        done = unclear(done, _problem_of_key({done.name: done.arguments}, self._markup))
        if done.id in self._ids:
            done = done.failed(CallStatus.DUPLICATE_ID, f"the call id {done.id!r} was used twice")
        if done.id:
            self._ids.add(done.id)
        if done.span is not None and (tokens := self._source.tokens(done.span)) is not None:
            done = replace(done, token_span=tokens)
        self._calls.append(done)
        self._deltas.append(Delta("tool_call", call=done))

    def empty_block(self, text: str) -> None:
        """Record a block of calls, `text`, that contains no call."""
        self._lookalikes.append(lookalike(text))

    def begin_verbatim(self, pos: int) -> None:
        """Treat all text from `pos` on as content and ignore calls there."""
        if self._verbatim_at is None:
            self._verbatim_at = pos

    def verbatim(self, text: str) -> None:
        """After `begin_verbatim`, add the new part of `text` (the reply so far) as content."""
        if self._verbatim_at is not None:
            self._put("content", self._content.add(text[self._verbatim_at :]))
            self._verbatim_at = len(text)

    def _put(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if text:
            self._deltas.append(Delta(kind, text))

    def drain(self) -> list[Delta]:
        """Return the deltas since the previous `drain`."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def reply(self) -> ParsedReply:
        """Return the collected reply."""
        reasoning = str(self._reasoning) or (None if self.reasoning_closed else "")
        content, names = str(self._content), self._offered.functions if self._offered else ()
        looks = (*self._lookalikes, *lookalikes(content, self._beside, names))
        return ParsedReply(content, reasoning, tuple(self._calls), self.reasoning_closed, looks)


@lru_cache(maxsize=512)
def _markup(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for `markers`, without the `>` at their end, because it may end a key.
    Markers of at most three characters, such as `;`, are also text.
    """
    texts = (marker.strip().rstrip(">") for marker in markers if len(marker) > 3)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _problem_of_key(value: Any, markup: re.Pattern[str]) -> str | None:
    """Return what is wrong with a key in `value`: it is repeated, or contains a marker. Return None
    if all keys are clear.
    """
    if isinstance(value, Members):
        return f"the key {value.repeated!r} gives a second value"
    if isinstance(value, dict):
        for key in filter(markup.search, value):
            return f"{key!r} contains a marker of the format"
        value = [*value.values()]
    for item in value if isinstance(value, list) else ():
        if problem := _problem_of_key(item, markup):
            return problem
    return None
