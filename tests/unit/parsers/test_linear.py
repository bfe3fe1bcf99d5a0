"""Hostile texts take time in proportion to their length, at once and in pieces. The bounds are wide: a quadratic reader exceeds them
many times over."""

from __future__ import annotations

import time

import pytest
from support.formats import FORMATS

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers, get_parser

# What was found to be quadratic once, and what a reader might stumble over.
UNITS = ("{", "[", " ", "[f(a='", "[f(a=[", '\\"', "</parameter>", "1")
LITERALS = ("t", "-", "tru")  # begun behind an opener, and not what they seemed to be

# What a stream waits in: prose, white space, a name, a key, a number, a string.
WAITS = ("", "[", "[f(a=", "[f(a='", "f(")
HELD = ("word é ", " ", "a", "1")
SMALL, LARGE = 15_000, 60_000
PIECE = 8


def in_small_pieces(parser: ToolCallParser, text: str) -> float:
    """The seconds of CPU for a stream that is fed `text` in pieces of eight characters."""
    begin = time.process_time()
    stream = parser.stream(in_reasoning=False)
    for start in range(0, len(text), PIECE):
        stream.feed(text[start : start + PIECE])
    stream.close()
    return time.process_time() - begin


def growth(parser: ToolCallParser, lead: str, unit: str, small: int, large: int) -> float:
    """How many times longer a stream takes for `large` characters than for `small`; the least of three, for a busy machine."""
    tries = []
    for _ in range(3):
        first = in_small_pieces(parser, lead + unit * (small // len(unit)))
        tries.append(in_small_pieces(parser, lead + unit * (large // len(unit))) / first)
        if tries[-1] < 1.5 * large / small:
            break
    return min(tries)


@pytest.mark.parametrize("kind", built_in_parsers(), ids=lambda kind: kind.name)
def test_reading_is_linear(kind: type[ToolCallParser]) -> None:
    parser = kind()
    opener = (*kind.openers, *kind.markers, "")[0]
    texts = [unit * (1_000_000 // len(unit)) for unit in ("<think>", "{", *([opener] if opener else []))]
    texts += [first + unit * (100_000 // len(unit)) for first in dict.fromkeys((opener, "x ")) for unit in UNITS]
    for text in texts:
        begin = time.process_time()
        parser.parse(text)
        assert time.process_time() - begin < 5, text[:40]


@pytest.mark.parametrize("kind", built_in_parsers(), ids=lambda kind: kind.name)
def test_reading_in_pieces_is_linear_wherever_it_waits(kind: type[ToolCallParser]) -> None:
    parser = kind()
    opener = (*kind.openers, *kind.markers, "")[0]
    calls = [("tool_qz", {"key_qz": "text_qz", "number_qz": 987})]
    wrote = next((form.write(calls) for form in FORMATS if form.name == kind.name), "")
    inside = (wrote[: wrote.find(word) + 1] for word in ("tool_qz", "key_qz", "text_qz", "987"))
    for lead in dict.fromkeys((*WAITS, opener, *inside, wrote)):
        for unit in HELD:
            assert growth(parser, lead, unit, SMALL, LARGE) < 2.5 * LARGE / SMALL, (lead, unit)


@pytest.mark.parametrize("lead", ["", '<tool_call>{"name": "f", "arguments": {"a": "'])
def test_a_megabyte_in_pieces_is_not_copied_for_each(lead: str) -> None:
    # Copying alone takes long enough to be seen at this size only: 3.8 times for the double where each piece copies the whole.
    assert growth(get_parser("hermes"), lead, "word é ", 500_000, 1_000_000) < 3


@pytest.mark.parametrize("unit", LITERALS)
def test_a_literal_that_breaks_off_costs_no_more_than_itself(unit: str) -> None:
    parser = get_parser("hermes")
    tries = []
    for _ in range(3):  # the least of three, for a busy machine
        found = []
        for number in (15_000, 60_000):
            text = f"<tool_call>{unit}" * number + "𝛑"  # four bytes a character: what copies the rest of the text is slow
            begin = time.process_time()
            parser.parse(text)
            found.append(time.process_time() - begin)
        tries.append(found[1] / found[0])
        if tries[-1] < 6:
            break
    assert min(tries) < 8
