"""Hostile texts take time in proportion to their length. The bounds are wide: a quadratic reader exceeds them many times over."""

from __future__ import annotations

import time

import pytest

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers

# What was found to be quadratic once, and what a reader might stumble over.
UNITS = ("{", "[", " ", "[f(a='", "[f(a=[", '\\"', "</parameter>", "1")


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
