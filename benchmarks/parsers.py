"""The time of each parser for one megabyte of hostile text, and for twice that, since parsing must
be linear.

    python benchmarks/parsers.py [NAME ...]

Prints for each format:

- the seconds for 1 MB of its own openers, of `{`, of `[`, of `x [f(` and of `<think>`, which must
  be less than one;
- the seconds for 1 MB of prose in pieces of eight characters, and the ratio to half of it;
- the slowest of many other texts of 100 KB, and the ratio of four times its size to it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers

SIZE = 100_000
UNITS = (
    "{", "[", "<think>", "</think>", "<", "\\", '"', "'", " ", "\n", "a", "<|", '{"a":',
    '{"name": "f", "arguments": {', "[f(a='",
    "[f(a=[", "[f(", "f(a=1),", '\\"', "'''", "{}", "[]", "</parameter>", "</arg_value>",
)  # fmt: skip


def texts(parser: ToolCallParser, size: int) -> Iterator[tuple[str, str]]:
    """Yield hostile texts of about `size` characters for `parser`, by the repeated unit."""
    marks = (*parser.openers, *parser.markers)
    own = (
        *marks,
        "".join(marks) or "x",
        *(mark + "{" for mark in marks),
        *(mark + "f\n" for mark in marks),
    )
    for unit in dict.fromkeys((*UNITS, *own)):
        yield unit, unit * (size // len(unit))
        for mark in marks[:2]:
            yield f"{mark} then {unit}", mark + unit * (size // len(unit))


def seconds(parser: ToolCallParser, text: str) -> float:
    """Return the time of one parse."""
    gc.collect()
    begin = time.process_time()
    parser.parse(text, in_reasoning=False)
    return time.process_time() - begin


def streamed(parser: ToolCallParser, text: str) -> float:
    """Return the time of one stream in pieces of eight characters."""
    gc.collect()
    begin = time.process_time()
    stream = parser.stream(in_reasoning=False)
    for start in range(0, len(text), 8):
        stream.feed(text[start : start + 8])
    stream.close()
    return time.process_time() - begin


def main(names: list[str]) -> int:
    """Measure, and return the number of formats that took over a second or grew faster than the
    text.
    """
    bad = 0
    for kind in built_in_parsers():
        if names and kind.name not in names:
            continue
        parser = kind()
        named = [
            seconds(parser, unit * (1_000_000 // len(unit)))
            for unit in (*kind.openers[:1], "{", "[", "x [f(", "<think>")
        ]
        prose = "word é " * (1_000_000 // 7)
        half, whole = streamed(parser, prose[: len(prose) // 2]), streamed(parser, prose)
        slowest, unit, text = max(
            (seconds(parser, text), unit, text) for unit, text in texts(parser, SIZE)
        )
        growth = seconds(parser, text * 4) / max(slowest, 1e-9)
        bad += max(named) > 1 or whole > 3 * half or (growth > 8 and slowest > 0.01)
        figures = " ".join(f"{one:5.2f}" for one in named)
        pieces = f"in pieces {whole:5.2f} s, x{whole / half:4.1f}"
        print(
            f"{kind.name:16} {figures} s   {pieces}   100 KB: {slowest:5.2f} s, x{growth:4.1f} for "
            f"400 KB of {unit!r}",
            flush=True,
        )
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
