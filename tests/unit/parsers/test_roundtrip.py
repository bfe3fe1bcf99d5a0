"""What a family's writer writes, its parser reads back: the calls, the text, and the same in
pieces.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import calls, same
from support.formats import FORMATS, Format, tools_for
from support.parsing import in_pieces, lost

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers, get_parser

IDS = [f"{form.name}-{form.write.__name__}" for form in FORMATS]


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_what_a_writer_writes_is_read_back(form: Format) -> None:
    parser = get_parser(form.name)

    @given(
        found=calls(form),
        lead=st.sampled_from(("", "I look it up.\n", "Ünïcode: «x»\n\n")),
        data=st.data(),
    )
    def check(found: list[Any], lead: str, data: st.DataObject) -> None:
        lead = lead if form.spoken else ""
        text = lead + form.write(found)
        tools = tools_for(found)
        reply = parser.parse(text, tools=tools, in_reasoning=False)
        assert reply.content == lead.strip()
        assert [(call.name, call.status.value, call.error) for call in reply.tool_calls] == [
            (name, "ok", None) for name, _ in found
        ]
        assert all(
            same(call.arguments, arguments)
            for call, (_, arguments) in zip(reply.tool_calls, found, strict=True)
        )
        assert not lost(parser, text, reply)
        places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [
            text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)
        ]
        assert in_pieces(parser, pieces, tools=tools, in_reasoning=False)[0] == reply

    check()


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_a_value_may_spell_each_of_the_formats_markers(form: Format) -> None:
    parser = get_parser(form.name)
    for marker in dict.fromkeys((*form.markers, *parser.markers)):
        for value in (f"a{marker}b", f"{marker}b", {"k": [f"a{marker}"]}):
            if form.carries(value):
                found = [("f", {"a": value, "b": 1})]
                reply = parser.parse(form.write(found), tools=tools_for(found), in_reasoning=False)
                assert [(call.name, call.arguments, call.error) for call in reply.tool_calls] == [
                    (*found[0], None)
                ], marker


WITHOUT_WRITER = {"plain": "it reads no calls: the whole reply is content"}
"""Formats that have no writer in `support.formats`, each with the reason."""


@pytest.mark.parametrize("kind", built_in_parsers())
def test_every_format_has_a_writer(kind: type[ToolCallParser]) -> None:
    written = {form.name for form in FORMATS}
    assert (kind.name in written) != (kind.name in WITHOUT_WRITER)
