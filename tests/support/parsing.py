"""Shared helpers for tests of parsers: parsing in pieces, and the properties of every reply."""

import random
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.types import Delta, ParsedReply


def tool(
    name: str, properties: dict[str, Any] | None = None, *, required: Sequence[str] = ()
) -> dict[str, Any]:
    """A tool in OpenAI's format."""
    schema: dict[str, Any] = {"type": "object", "properties": properties or {}}
    if required:
        schema["required"] = list(required)
    function = {"name": name, "description": name, "parameters": schema}
    return {"type": "function", "function": function}


def in_pieces(
    parser: ToolCallParser, pieces: Iterable[str], **options: Any
) -> tuple[ParsedReply, list[Delta]]:
    """The reply and the steps of a stream that is fed `pieces`."""
    stream = parser.stream(**options)
    steps: list[Delta] = []
    for piece in pieces:
        steps += stream.feed(piece)
    steps += stream.close()
    return stream.reply, steps


def cuts(text: str, seed: int = 0) -> list[list[str]]:
    """Ways to cut `text`: character by character, in two at up to 24 places, at random."""
    picks = random.Random(seed)
    places = (
        range(1, len(text)) if len(text) < 32 else sorted(picks.sample(range(1, len(text)), 24))
    )
    found = [list(text), *([text[:place], text[place:]] for place in places)]
    for _ in range(2):
        edges = [0, *sorted(picks.randint(0, len(text)) for _ in range(5)), len(text)]
        found.append([text[start:stop] for start, stop in pairwise(edges)])
    return found


def assert_same_in_pieces(parser: ToolCallParser, text: str, **options: Any) -> ParsedReply:
    """`feed` and `close` give what `parse` gives, however `text` is cut, and so do the steps."""
    whole = parser.parse(text, **options)
    for pieces in cuts(text):
        reply, steps = in_pieces(parser, pieces, **options)
        assert reply == whole, pieces
        assert "".join(step.text for step in steps if step.kind == "content") == whole.content
        assert "".join(step.text for step in steps if step.kind == "reasoning") == (
            whole.reasoning or ""
        )
        assert [step.call for step in steps if step.kind == "tool_call"] == list(whole.tool_calls)
    return whole


def lost(parser: ToolCallParser, text: str, reply: ParsedReply) -> str:
    """What of `text`, white space aside, is in no call's span, nor in content or reasoning, nor one
    of the format's own markers; "" for nothing: the text outside of calls must be reasoning and
    content, each in its order, with markers between."""
    outside, at = "", 0
    for start, stop in sorted({call.span for call in reply.tool_calls if call.span is not None}):
        outside += text[at:start]
        at = max(at, stop)
    outside = _packed(outside + text[at:])
    reasoning, content = _packed(reply.reasoning or ""), _packed(reply.content)
    tags = parser.reasoning.markers if parser.reasoning is not None else ()
    markers = tuple(dict.fromkeys(_packed(marker) for marker in (*parser.markers, *tags)))
    reached: dict[int, set[tuple[int, int]]] = {0: {(0, 0)}}
    for place in range(len(outside)):
        found = reached.pop(place, set())
        jumps = (
            [len(marker) for marker in markers if outside.startswith(marker, place)]
            if found
            else []
        )
        for thought, said in found:
            for jump in jumps:
                reached.setdefault(place + jump, set()).add((thought, said))
            if reasoning[thought : thought + 1] == outside[place]:
                reached.setdefault(place + 1, set()).add((thought + 1, said))
            if content[said : said + 1] == outside[place]:
                reached.setdefault(place + 1, set()).add((thought, said + 1))
        if not reached:
            return outside[place:]
    return (
        ""
        if (len(reasoning), len(content)) in reached.get(len(outside), set())
        else outside or reasoning + content
    )


def _packed(text: str) -> str:
    return re.sub(r"\s+", "", text)
