"""With token ids a marker counts only where it is the control token."""

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


def tokenized(quoted: str, written: str, markers: tuple[str, ...]) -> list[tuple[int, int]]:
    """Spans of tokens: one a character, but one for each control token in what was written."""
    longest_first = sorted(markers, key=len, reverse=True)
    token = re.compile("|".join([*map(re.escape, longest_first), "(?s:.)"]))
    spans = [(place, place + 1) for place in range(len(quoted))]
    return spans + [match.span() for match in token.finditer(quoted + written, len(quoted))]


@pytest.mark.parametrize(
    "form", MARKED, ids=[f"{form.name}-{form.write.__name__}" for form in MARKED]
)
def test_a_quoted_marker_is_text_and_a_call_knows_its_tokens(form: Format) -> None:
    markers = get_parser(form.name).markers
    parser = get_parser(form.name, markers)
    quoted = f"I write {parser.openers[0]} and {''.join(markers)} like this. "
    written = form.write([("get_order", {"id": "#W1", "n": 1}), ("list_all", {})])
    spans = tokenized(quoted, written, markers)
    options = {"tools": TOOLS, "in_reasoning": False}
    reply = parser.parse(quoted + written, ids=range(len(spans)), offsets=spans, **options)  # type: ignore[arg-type]
    assert reply.content == quoted.strip()
    calls = [(call.name, call.ok) for call in reply.tool_calls][-2:]
    assert calls == [("get_order", True), ("list_all", True)]
    for call in reply.ok_calls:
        assert call.span is not None and call.token_span is not None
        first, last = call.token_span
        assert spans[first][0] <= call.span[0] < call.span[1] <= spans[last - 1][1]


def test_ids_and_offsets_must_agree() -> None:
    with pytest.raises(ValueError, match="2 ids have 1 offsets"):
        get_parser("hermes").parse("x", ids=[1, 2], offsets=[(0, 1)])
