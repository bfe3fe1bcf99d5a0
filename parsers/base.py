"""`ToolCallParser`: the text that the model wrote, taken apart.

Invariants: `parse` never raises for any text; nothing is lost (see `toolroll.parsers.types`); a format's marker counts only
where it is the real control token, when ids are given and the vocabulary has it as one token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolroll.parsers.reasoning import split_reasoning
from toolroll.parsers.schema import ToolSchemas
from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall

Tool = Mapping[str, Any]
Span = tuple[int, int]


class Source:
    """A reply's text with the places of its tokens."""

    def __init__(self, text: str, offsets: Sequence[Span] | None, control: Collection[str]) -> None:
        self.text = text
        self._offsets = offsets
        self._control = control
        self._single = {span: index for index, span in enumerate(offsets)} if offsets is not None else {}

    def find(self, marker: str, start: int) -> int:
        """The next place of `marker` at or behind `start`, -1 for none. Text that only spells a control token is passed over."""
        at = self.text.find(marker, start)
        if self._offsets is None or marker not in self._control:
            return at
        while at >= 0 and (at, at + len(marker)) not in self._single:
            at = self.text.find(marker, at + 1)
        return at

    def tokens(self, span: Span) -> Span | None:
        """The token positions that cover a span of characters, None without offsets."""
        if self._offsets is None:
            return None
        inside = [index for index, (start, stop) in enumerate(self._offsets) if start < span[1] and stop > span[0]]
        return (inside[0], inside[-1] + 1) if inside else None


class ToolCallParser(ABC):
    """One wire format. `control_tokens`: the texts that the vocabulary holds as single control tokens."""

    name: str = ""
    aliases: tuple[str, ...] = ()

    def __init__(self, control_tokens: Collection[str] = ()) -> None:
        self.control_tokens = frozenset(control_tokens)
        self._schemas = ToolSchemas()

    def parse(
        self,
        text: str,
        *,
        ids: Sequence[int] | None = None,
        offsets: Sequence[Span] | None = None,
        tools: Sequence[Tool] | None = None,
        in_reasoning: bool = False,
    ) -> ParsedReply:
        """Take `text` (without the stop token) apart.

        `offsets`: [start, stop) in characters for each of `ids`. `tools`: the tools that were offered; None checks neither names
        nor arguments. `in_reasoning`: the prompt's prefill opened the reasoning already.
        """
        reasoning, closed, begin = split_reasoning(text, in_reasoning=in_reasoning)
        source = Source(text, offsets, self.control_tokens)
        content, calls = self.scan(source, begin) if closed else ("", [])
        checked: list[ToolCall] = []
        seen: set[str] = set()
        for call in calls:
            done = self._schemas.check(call, tools) if call.ok and tools is not None else call
            if done.ok and done.id and done.id in seen:
                done = replace(done, status=CallStatus.DUPLICATE_ID, error=f"the call id {done.id!r} was used twice")
            seen.add(done.id)
            checked.append(replace(done, token_span=source.tokens(done.span)) if done.span else done)
        return ParsedReply(content, reasoning, tuple(checked), closed)

    @abstractmethod
    def scan(self, source: Source, begin: int) -> tuple[str, list[ToolCall]]:
        """The visible text and every attempted call in `source.text[begin:]`."""
