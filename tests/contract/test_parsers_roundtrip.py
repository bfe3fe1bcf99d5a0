"""What a family's writer or chat template writes, its parser reads back: the calls, the text, and the same in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.calls import calls
from support.formats import FORMATS, Format, tools_for
from support.parsing import in_pieces, lost

from toolroll.parsers.registry import get_parser

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
IDS = [f"{form.name}-{form.write.__name__}" for form in FORMATS]


def same(left: Any, right: Any) -> bool:
    """Equal, with True and 1 told apart, and 1 and 1.0 not."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_what_a_writer_writes_is_read_back(form: Format) -> None:
    parser = get_parser(form.name)

    @QUICK
    @given(found=calls(form), lead=st.sampled_from(("", "I look it up.\n", "Ünïcode: «x»\n\n")), data=st.data())
    def check(found: list[Any], lead: str, data: st.DataObject) -> None:
        if form.name == "llama3" and lead:
            lead = ""
        text = lead + form.write(found)
        tools = tools_for(found)
        reply = parser.parse(text, tools=tools, in_reasoning=False)
        assert reply.content == lead.strip()
        assert [(call.name, call.status.value, call.error) for call in reply.tool_calls] == [(name, "ok", None) for name, _ in found]
        assert all(same(call.arguments, arguments) for call, (_, arguments) in zip(reply.tool_calls, found, strict=True))
        assert not lost(parser, text, reply)
        places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]
        assert in_pieces(parser, pieces, tools=tools, in_reasoning=False)[0] == reply

    check()
