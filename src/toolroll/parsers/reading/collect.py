"""`Collector`: what a reader finds, put together as a reply and as the steps of a stream.

Invariant: the steps of one kind, joined, are the reply's field of that kind; so white space at an
edge is held back until text follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from toolroll.parsers.types import Delta, ParsedReply, ToolCall


class _Trimmed:
    """Text that comes in pieces, without the `chars` (None: white space) at its edges."""

    def __init__(self, chars: str | None) -> None:
        self._chars = chars
        self._held: list[str] = []
        self.parts: list[str] = []

    def add(self, text: str) -> str:
        """Take `text` in; what of it, and of what was held, is certain now."""
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
    """Takes reasoning, content and calls in the order written. `check` completes a call: its
    status and its tokens.
    """

    def __init__(self, check: Callable[[ToolCall], ToolCall]) -> None:
        self._check = check
        self._content = _Trimmed(None)
        self._reasoning = _Trimmed("\n")
        self._calls: list[ToolCall] = []
        self._deltas: list[Delta] = []
        self.reasoning_closed = True

    def content(self, text: str) -> None:
        """Visible text."""
        self._put("content", self._content.add(text))

    def reasoning(self, text: str) -> None:
        """A piece of reasoning."""
        self._put("reasoning", self._reasoning.add(text))

    def call(self, call: ToolCall) -> None:
        """An attempted call."""
        done = self._check(call)
        self._calls.append(done)
        self._deltas.append(Delta("tool_call", call=done))

    def _put(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if text:
            self._deltas.append(Delta(kind, text))

    def drain(self) -> list[Delta]:
        """The steps since the last time."""
        found, self._deltas = self._deltas, []
        return found

    def reply(self) -> ParsedReply:
        """All that was found."""
        reasoning = str(self._reasoning) or (None if self.reasoning_closed else "")
        return ParsedReply(str(self._content), reasoning, tuple(self._calls), self.reasoning_closed)
