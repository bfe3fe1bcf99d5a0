"""Reading a hostile text is linear work, which is counted (see `support.work`), not timed."""

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from support.formats import FORMATS
from support.memory import peak
from support.tiers import by_code
from support.work import CountedText, Work

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.formats.hermes import HermesParser, InternParser
from toolroll.parsers.formats.pythonic import PythonicParser
from toolroll.parsers.formats.tags import TagParser
from toolroll.parsers.registry import built_in_parsers

# What was found to be quadratic once, and what a reader might stumble over.
UNITS = ("{", "[", " ", "[f(a='", "[f(a=[", '\\"', "</parameter>", "1")
LITERALS = ("t", "-", "tru")  # begun after an opener, and not what they seemed to be

# What a stream waits in: prose, white space, a name, a key, a number, a string.
WAITS = ("", "[", "[f(a=", "[f(a='", "f(")
HELD = ("word é ", " ", "a", "1")
SIZES = (300, 600)
PIECE = 16
Read = Callable[[ToolCallParser, str], None]


def name_of(kind: type[ToolCallParser]) -> str:
    return kind.name


KINDS = pytest.mark.parametrize("kind", by_code(built_in_parsers(), name_of), ids=name_of)


def at_once(parser: ToolCallParser, text: str) -> None:
    parser.parse(text)


def in_reasoning(parser: ToolCallParser, text: str) -> None:
    """Read `text` whole, as a reply that begins in its reasoning."""
    parser.parse(text, in_reasoning=True)


def in_small_pieces(parser: ToolCallParser, text: str) -> None:
    stream = parser.stream(in_reasoning=False)
    for start in range(0, len(text), PIECE):
        stream.feed(text[start : start + PIECE])
    stream.close()


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    with work.counted():
        yield work


def assert_linear(work: Any, read: Read, parser: Any, lead: str, unit: str, tail: str = "") -> None:
    """Raise `AssertionError` if twice as much of `unit` between `lead` and `tail` is more than
    twice the work."""
    read(parser, lead + unit + tail)  # what is done once for all texts, like compiling patterns
    work_by_size = []
    for size in SIZES:
        before = work.total
        read(parser, CountedText(lead + unit * (size // min(len(unit), 5)) + tail, work))
        work_by_size.append(work.total - before)
    less, more = work_by_size
    assert SIZES[0] < less < more <= 2.05 * less, (read, lead, unit, work_by_size)


Case = tuple[Read, str, str, str]


def cases(kind: type[ToolCallParser]) -> Iterator[Case]:
    """How a text is read, its start, what follows again and again, and its end."""
    opener = (*kind.openers, *kind.markers, "")[0]
    for unit in ("<think>", opener or "x", *(opener + literal for literal in LITERALS)):
        yield at_once, "", unit, ""
    for lead, unit in product((opener, "x "), UNITS):
        yield at_once, lead, unit, ""
    for begun, end in product(kind.openers[:1], ("", "{", "</think")):
        yield in_reasoning, "", begun + end, ""
    calls = [("tool_qz", {"key_qz": "text_qz", "number_qz": 987})]
    wrote = next((form.write(calls) for form in FORMATS if form.name == kind.name), "")
    inside = (wrote[: wrote.find(word) + 1] for word in ("tool_qz", "key_qz", "text_qz", "987"))
    for lead, unit in product((*WAITS, opener, *inside, wrote), HELD):
        yield in_small_pieces, lead, unit, ""
    if not issubclass(kind, TagParser):
        return
    # Each value has its closing marker, or the tag that it swallowed, at the far end.
    shape = kind.shape
    parameter = lambda key: f"{shape.key[0]}{key}{shape.key[1]}{shape.value[0]}"
    start = f"{(shape.block or ('',))[0]}{shape.call[0]}f{shape.name_end[0]}"
    end, inner = f"{shape.value[1]}{shape.call[1]}", f"{shape.value[1]} x "
    units = (parameter("a"), parameter("a b"), inner, parameter("a b") + inner)
    tails = (end, parameter("c") + end, inner + parameter("c") + end)
    for unit, tail in product(units, tails):
        yield at_once, "", start + unit, tail


@KINDS
def test_reading_is_linear(kind: type[ToolCallParser], work: Work) -> None:
    parser = kind()
    for read, lead, unit, tail in dict.fromkeys(cases(kind)):
        assert_linear(work, read, parser, lead, unit, tail)


@pytest.mark.parametrize(
    "unit", ["[", "[1", "[ \n", "[f ", "[<", "[<|x", "[f(", "[f( =", "[f.g({", "[f(x "]
)
@pytest.mark.parametrize(
    ("read", "most"), [(at_once, 8), (in_small_pieces, 60)], ids=["at once", "in pieces"]
)
def test_brackets_of_no_call_are_read_in_bulk(read: Read, most: int, unit: str, work: Work) -> None:
    """A megabyte of them took seconds: each bracket was looked at by itself."""
    parser = PythonicParser()
    read(parser, "x " + unit)
    before = work.total
    read(parser, CountedText("x " + unit * (3000 // len(unit)), work))
    assert work.total - before < most * 3000


@pytest.mark.parametrize("kind", [HermesParser, InternParser], ids=lambda kind: kind.name)
def test_openers_in_a_row_cost_little(kind: type[ToolCallParser], work: Work) -> None:
    parser, opener = kind(), kind.openers[0]
    parser.parse(opener)
    before = work.total
    parser.parse(CountedText(opener * 100, work))
    assert work.total - before < 100 * (5 * len(opener) + 80)


@KINDS
def test_no_piece_copies_the_whole(kind: type[ToolCallParser]) -> None:
    for lead in ("", '<tool_call>{"name": "f", "arguments": {"a": "'):
        tracemalloc.start()
        try:
            stream = kind().stream(in_reasoning=False)
            for text in (lead, *["word é "] * 50, "word é " * 10_000):
                stream.feed(text)
            assert (
                peak(lambda stream=stream: [stream.feed("word é ") for _ in range(10)]) < 20_000  # type: ignore[misc]
            ), lead
        finally:
            tracemalloc.stop()
