"""No text makes a parser raise, lose text, or read it otherwise in pieces."""

import random
import re
from itertools import pairwise
from typing import Any

import pytest
from support.calls import pieces_of
from support.formats import tools_for
from support.parsing import in_pieces, lost
from support.tiers import fuzz_texts

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers
from toolroll.parsers.types import Delta

TOOLS = tools_for([("x", {"id": "a"}), ("get_order", {"id": 1, "city": "a"})])


def options_of(picks: random.Random) -> Any:
    return {
        "tools": picks.choice((None, TOOLS)),
        "in_reasoning": picks.choice((None, True, False)),
        "calls_as_text": picks.random() < 0.2,
    }


@pytest.mark.parametrize("kind", built_in_parsers(), ids=lambda kind: kind.name)
def test_no_text_breaks_a_parser(kind: type[ToolCallParser]) -> None:
    parser, picks, statuses = kind(), random.Random(kind.name), set()
    for _ in range(fuzz_texts()):
        text, options = "".join(pieces_of(kind, picks)), options_of(picks)
        reply = parser.parse(text, **options)
        assert not lost(parser, text, reply), text
        assert not (options["calls_as_text"] and reply.tool_calls)
        for call in reply.tool_calls:
            assert call.span is not None
            assert 0 <= call.span[0] <= call.span[1] <= len(text)
            assert call.ok == (call.error is None)
            assert not call.ok or isinstance(call.arguments, dict)
        places = sorted(picks.randint(0, len(text)) for _ in range(picks.randint(0, 5)))
        pieces = [text[start:stop] for start, stop in pairwise([0, *places, len(text)])]
        assert in_pieces(parser, pieces, **options)[0] == reply, pieces
        statuses |= {call.status.value for call in reply.tool_calls}
    assert kind.name == "plain" or statuses >= {"ok", "invalid_json", "unclosed"}


def tokens_of(text: str, control: list[str], picks: random.Random) -> list[tuple[int, int]]:
    """Spans of tokens of one to three characters. Most control tokens that `text` spells are one
    token."""
    single = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
    spans, at = [], 0
    while at < len(text):
        match = single.match(text, at) if picks.random() < 0.85 else None
        stop = match.end() if match else min(len(text), at + picks.choice((1, 1, 2, 3)))
        spans.append((at, stop))
        at = stop
    return spans


def texts_of(deltas: list[Delta], kind: str) -> str:
    """The text of the deltas of one kind."""
    return "".join(delta.text for delta in deltas if delta.kind == kind)


@pytest.mark.parametrize("kind", built_in_parsers(), ids=lambda kind: kind.name)
def test_pieces_of_tokens_are_read_like_the_whole(kind: type[ToolCallParser]) -> None:
    """With offsets, for any set of control tokens, a stream of whole tokens gives what `parse`
    gives, and its deltas are the reply."""
    picks = random.Random(f"tokens of {kind.name}")
    thoughts = kind.reasoning.markers if kind.reasoning is not None else ()
    marks = sorted({*kind.openers, *kind.markers, *thoughts})
    for _ in range(fuzz_texts() // 4):
        text = "".join(pieces_of(kind, picks))
        control = [mark for mark in marks if picks.random() < 0.6]
        parser, spans = kind(control), tokens_of(text, control, picks)
        options = options_of(picks)
        whole = parser.parse(text, ids=range(len(spans)), offsets=spans, **options)
        assert not lost(parser, text, whole), text
        stream, deltas = parser.stream(**options), []
        rate = picks.choice((0.2, 1.0))
        borders = [at for at in range(1, len(spans)) if picks.random() < rate]
        for first, last in pairwise([0, *borders, len(spans)]):
            some = spans[first:last]
            base = some[0][0] if some else 0
            piece = text[base : some[-1][1]] if some else ""
            deltas += stream.feed(piece, offsets=[(a - base, b - base) for a, b in some])
        deltas += stream.close()
        assert stream.reply == whole, (text, control)
        assert texts_of(deltas, "content") == whole.content
        assert texts_of(deltas, "reasoning") == (whole.reasoning or "")
        assert [delta.call for delta in deltas if delta.call] == list(whole.tool_calls)
