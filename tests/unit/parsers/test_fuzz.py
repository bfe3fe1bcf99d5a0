"""No text makes a parser raise, lose text, or read it otherwise in pieces (`make fuzz`: 100,000
texts for each format).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.formats import tools_for
from support.fuzz import pieces_of
from support.parsing import in_pieces, lost
from support.tiers import fuzz_texts

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers
from toolroll.parsers.types import ParsedReply


def check(parser: ToolCallParser, text: str, picks: random.Random) -> ParsedReply:
    """What must be true of any reply."""
    tools = picks.choice(
        (None, tools_for([("x", {"id": "a"}), ("get_order", {"id": 1, "city": "a"})]))
    )
    options: Any = {
        "tools": tools,
        "in_reasoning": picks.choice((None, True, False)),
        "calls_as_text": picks.random() < 0.2,
    }
    reply = parser.parse(text, **options)
    assert not lost(parser, text, reply), text
    assert not (options["calls_as_text"] and reply.tool_calls)
    for call in reply.tool_calls:
        assert call.span is not None
        assert 0 <= call.span[0] <= call.span[1] <= len(text)
        assert call.ok == (call.error is None)
        assert not call.ok or isinstance(call.arguments, dict)
    places = sorted(picks.randint(0, len(text)) for _ in range(picks.randint(0, 5)))
    pieces = [
        text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)
    ]
    assert in_pieces(parser, pieces, **options)[0] == reply, pieces
    return reply


@pytest.mark.parametrize("kind", built_in_parsers(), ids=lambda kind: kind.name)
def test_no_text_breaks_a_parser(kind: type[ToolCallParser]) -> None:
    parser = kind()
    picks = random.Random(kind.name)
    statuses = set()
    for _ in range(fuzz_texts()):
        reply = check(parser, "".join(pieces_of(kind, picks)), picks)
        statuses |= {call.status.value for call in reply.tool_calls}
    assert kind.name == "plain" or statuses >= {"ok", "invalid_json", "unclosed"}
