"""With token ids a marker counts only where it is the control token: quoted markers are text,
and calls know their tokens.
"""

from __future__ import annotations

import re

import pytest
from support.formats import FORMATS, Format
from support.parsing import tool

from toolroll.parsers.registry import get_parser

TOOLS = [tool("get_order", {"id": {"type": "string"}, "n": {"type": "integer"}}), tool("list_all")]
MARKED = [
    form for form in FORMATS if get_parser(form.name).openers and form.spoken and form.parallel
]


def tokenised(quoted: str, written: str, markers: tuple[str, ...]) -> list[tuple[int, int]]:
    """Spans of tokens: one a character, but one for each control token in what was written."""
    spans = [(at, at + 1) for at in range(len(quoted))]
    single = re.compile(
        "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
    )
    at = 0
    while at < len(written):
        match = single.match(written, at)
        stop = match.end() if match is not None else at + 1
        spans.append((len(quoted) + at, len(quoted) + stop))
        at = stop
    return spans


@pytest.mark.parametrize(
    "form", MARKED, ids=[f"{form.name}-{form.write.__name__}" for form in MARKED]
)
def test_a_quoted_marker_is_text_and_a_call_knows_its_tokens(form: Format) -> None:
    markers = get_parser(form.name).markers
    parser = get_parser(form.name, markers)
    opener = parser.openers[0]
    quoted = f"I write {opener} and {''.join(markers)} like this. "
    written = form.write([("get_order", {"id": "#W1", "n": 1}), ("list_all", {})])
    spans = tokenised(quoted, written, markers)
    reply = parser.parse(
        quoted + written,
        ids=list(range(len(spans))),
        offsets=spans,
        tools=TOOLS,
        in_reasoning=False,
    )
    assert reply.content == quoted.strip()
    assert [(call.name, call.ok) for call in reply.tool_calls][-2:] == [
        ("get_order", True),
        ("list_all", True),
    ]
    for call in reply.ok_calls:
        assert call.span is not None
        assert call.token_span is not None
        assert (
            spans[call.token_span[0]][0]
            <= call.span[0]
            < call.span[1]
            <= spans[call.token_span[1] - 1][1]
        )


def test_ids_and_offsets_must_agree() -> None:
    with pytest.raises(ValueError, match="2 ids have 1 offsets"):
        get_parser("hermes").parse("x", ids=[1, 2], offsets=[(0, 1)])
