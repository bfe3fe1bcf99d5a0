"""What a family's writer writes, its parser reads back: in pieces and as tokens too."""

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import assert_read_back, calls
from support.formats import FORMATS, Format, tools_for
from support.parsing import assert_same_in_pieces, in_pieces, lost, tool

from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

IDS = [form.name for form in FORMATS]
LEADS = ("", "I look it up.\n", "Ünïcode: «x»\n\n")
CALL = "look_up", {"city": "Paris", "page": 3}
PLACES = {"name": "look_up", "key": "city", "value": "Paris"}


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
@given(data=st.data())
def test_what_a_writer_writes_is_read_back(form: Format, data: st.DataObject) -> None:
    parser, found = get_parser(form.name), data.draw(calls(form))
    lead = data.draw(st.sampled_from(LEADS)) if form.spoken else ""
    text, tools = lead + form.write(found), tools_for(found)
    reply = parser.parse(text, tools=tools, in_reasoning=False)
    assert reply.content == lead.strip()
    assert_read_back(reply, found)
    assert not lost(parser, text, reply)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:stop] for start, stop in pairwise([0, *places, len(text)])]
    assert in_pieces(parser, pieces, tools=tools, in_reasoning=False)[0] == reply


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_a_value_may_spell_each_of_the_formats_markers(form: Format) -> None:
    parser = get_parser(form.name)
    for marker in dict.fromkeys((*form.markers, *parser.markers)):
        for value in (f"a{marker}b", f"{marker}b", f"{marker}b{marker}", {"k": [f"a{marker}"]}):
            if form.carries(value):
                found = [("f", {"a": value, "b": 1})]
                reply = parser.parse(form.write(found), tools=tools_for(found), in_reasoning=False)
                assert [(call.name, call.arguments, call.error) for call in reply.tool_calls] == [
                    (*found[0], None)
                ], marker


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_a_marker_is_kept_in_a_value_and_wrong_in_a_name_or_key(form: Format) -> None:
    parser, text = get_parser(form.name), form.write([CALL])
    markers = [marker for marker in {*parser.markers, *parser.inner} if len(marker) > 3]
    planted = [
        (place, marker, text[:at] + marker + text[at:])
        for place, word in PLACES.items()
        for match in re.finditer(word, text)
        for at in (match.start(), match.start() + 2, match.end())
        for marker in markers
    ]
    seen: Counter[str] = Counter()
    for tools in (tools_for([CALL]), None):
        for place, marker, changed in planted:
            reply = parser.parse(changed, tools=tools, in_reasoning=False)
            assert not lost(parser, changed, reply), changed
            for call in reply.ok_calls:
                names = (call.name, *(call.arguments or ()))
                assert not any(marker.strip().rstrip(">") in name for name in names), changed
                value = (call.arguments or {}).get("city")
                if place == "value" and value != "Paris":
                    assert str(value).replace(marker, "") == "Paris", changed
                seen[place] += 1
    assert seen["value"]


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_key_with_two_values_is_never_ok(form: Format, nested: bool) -> None:
    def arguments(**members: Any) -> dict[str, Any]:
        return {"o": members} if nested else members

    text, parser = form.write([("f", arguments(x1=1, x2=2, z=3))]), get_parser(form.name)
    reply = assert_same_in_pieces(parser, text.replace("x2", "x1"), in_reasoning=False)
    (call,) = reply.tool_calls
    if form.name == "minimax-m3":  # repeated elements are a list
        assert (call.arguments, call.ok) == (arguments(x1=[1, 2], z=3), True)
        return
    assert (call.name, call.status) == ("f", CallStatus.BAD_ARGUMENTS)
    assert call.error == "the call of f is not clear: the key 'x1' gives a second value"
    assert call.arguments == arguments(x1=2, z=3)


# --- with token ids, a marker counts only where it is the control token ---------------------------

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


@pytest.mark.parametrize("form", MARKED, ids=[form.name for form in MARKED])
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
