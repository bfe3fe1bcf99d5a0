"""No text makes a parser raise, lose text, or read it otherwise in pieces (`make fuzz`: 100,000
texts for each format).
"""

from __future__ import annotations

import random

import pytest
from support.calls import ordinary_calls
from support.formats import FORMATS, tools_for
from support.parsing import in_pieces, lost
from support.tiers import fuzz_texts

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers
from toolroll.parsers.types import ParsedReply

COMMON = (
    "{", "}", "[", "]", '"', "'", "\\", ",", ":", "=", "(", ")", "<", ">", "\n", " ", "a", "name",
    '"name"', '"arguments"', "null", "1",
    "-", "1e999", "NaN", "é", "\u2028", "\x00", "<think>", "</think>", "<|", "|>", "{}",
    '{"name": "x", "arguments": {"id": "a"}}', "[x(id='a')]",
)  # fmt: skip
OWN = {
    kind.name: [form for form in FORMATS if form.name == kind.name] for kind in built_in_parsers()
}


def pieces_of(kind: type[ToolCallParser], picks: random.Random) -> list[str]:
    """A text in pieces: markers and fragments, whole calls, and calls with something cut out or
    put in.
    """
    forms = OWN[kind.name]
    marks = (*kind.openers, *kind.markers, *(marker for form in forms for marker in form.markers))
    found = []
    for _ in range(picks.randint(1, 6)):
        sort = picks.random()
        if sort < 0.45 and forms:
            form = picks.choice(forms)
            text = form.write(ordinary_calls(form, picks))
            for _ in range(picks.randint(0, 2)):
                at = picks.randint(0, len(text))
                text = (
                    text[:at]
                    + picks.choice(("", *COMMON, *marks))
                    + text[at + picks.choice((0, 1, 1, 5, 30)) :]
                )
            found.append(text[: picks.choice((len(text), picks.randint(0, len(text))))])
        elif sort < 0.8 and marks:
            mark = picks.choice(marks)
            found.append(mark if picks.random() < 0.8 else mark[: picks.randint(0, len(mark))])
        else:
            found.append("".join(picks.choice(COMMON) for _ in range(picks.randint(1, 6))))
    return found


def check(parser: ToolCallParser, text: str, picks: random.Random) -> ParsedReply:
    """What must be true of any reply."""
    tools = picks.choice(
        (None, tools_for([("x", {"id": "a"}), ("get_order", {"id": 1, "city": "a"})]))
    )
    opened = picks.choice((None, True, False))
    reply = parser.parse(text, tools=tools, in_reasoning=opened)
    assert not lost(parser, text, reply), text
    for call in reply.tool_calls:
        assert call.span is not None
        assert 0 <= call.span[0] <= call.span[1] <= len(text)
        assert call.ok == (call.error is None)
        assert not call.ok or isinstance(call.arguments, dict)
    places = sorted(picks.randint(0, len(text)) for _ in range(picks.randint(0, 5)))
    pieces = [
        text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)
    ]
    assert in_pieces(parser, pieces, tools=tools, in_reasoning=opened)[0] == reply, pieces
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
