"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; and Intern-S1's form of the same.

One or several JSON objects, or a list of them, in each block; text between blocks is content.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from toolroll.parsers.base import ToolCallParser, broken_call, unclosed
from toolroll.parsers.collect import Collector
from toolroll.parsers.json_text import call_of, decode, scan_json
from toolroll.parsers.schema import Offered
from toolroll.parsers.source import Source, Steps
from toolroll.parsers.types import ToolCall


class HermesParser(ToolCallParser):
    """See the module."""

    name = "hermes"
    aliases: ClassVar[tuple[str, ...]] = ("qwen", "qwen25", "trinity")
    opener: ClassVar[str] = "<tool_call>"
    closer: ClassVar[str] = "</tool_call>"
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")

    def read_calls(self, source: Source, out: Collector, at: int, offered: Offered | None) -> Steps[None]:
        """See `ToolCallParser.read_calls`."""
        while True:
            begin, marker = yield from source.until(at, (self.opener,), out.content)
            if not marker:
                return
            at = yield from self._block(source, out, begin)

    def _block(self, source: Source, out: Collector, begin: int) -> Steps[int]:
        """Put the calls of the block that opens at `begin`; where the text goes on."""
        start = at = begin + len(self.opener)
        found: list[tuple[Any, int, int]] = []
        while True:
            at = yield from source.skip(at)
            char = yield from source.char(at)
            if found and char not in ("{", "["):
                break
            scanned = yield from scan_json(source, at)
            problem = scanned.problem
            if problem is None:
                try:
                    found.append((decode(source.text[at : scanned.stop]), at, scanned.stop))
                except ValueError as error:
                    problem = str(error)
            if problem is not None:
                return (
                    yield from self._broken(source, out, begin, start, f"{problem} (character {scanned.stop - start} of the call)")
                )
            at = scanned.stop
        # Behind the JSON a spelled-out closer is one too: it can be nothing else.
        closes = yield from source.starts(at, self.closer, spelled=True)
        if closes:
            stop = at + len(self.closer)
        elif at == len(source.text) or (yield from source.starts(at, self.opener)):
            stop = at
        else:
            return (yield from self._broken(source, out, begin, start, f"text follows the JSON object at character {at - start}"))
        for call in _calls(source, found):
            spanned = replace(call, span=(begin, stop))
            out.call(spanned if closes else unclosed(spanned, self.closer))
        return stop

    def _broken(self, source: Source, out: Collector, begin: int, start: int, problem: str) -> Steps[int]:
        error = f"the tool call is not valid JSON: {problem}"
        call, stop = yield from broken_call(source, begin, start, error, close=self.closer, opener=self.opener)
        out.call(call)
        return stop


class InternParser(HermesParser):
    """InternLM 2 and Intern-S1: `<|action_start|> <|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

    name = "interns1"
    aliases = ()
    opener = "<|action_start|> <|plugin|>"
    closer = "<|action_end|>"
    openers = ("<|action_start|> <|plugin|>",)
    markers = ("<|action_start|> <|plugin|>", "<|action_end|>")


def _calls(source: Source, found: list[tuple[Any, int, int]]) -> list[ToolCall]:
    calls = []
    for value, start, stop in found:
        raw = source.text[start:stop]
        calls += [call_of(one, raw, (start, stop)) for one in (value if isinstance(value, list) and value else [value])]
    return calls
