"""Texts that fuzzing found, each for some new way through the code or for a failure that was
mended: all of them, in every format. `corpus/` has a file for each scanner."""

import json
import random
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from support.parsing import in_pieces, lost, tool
from support.tiers import by_code

from toolroll.parsers.reading.json_text import MAX_DEPTH, Unreadable, scan_json
from toolroll.parsers.reading.python_text import python_value, read_call
from toolroll.parsers.reading.resolve import Schema
from toolroll.parsers.reading.source import Source
from toolroll.parsers.reading.values import value_by_schema
from toolroll.parsers.registry import built_in_parsers, get_parser

_DECODER = json.JSONDecoder()
_EITHER = {"anyOf": [{"type": "object"}, {"type": "array"}]}
_SCHEMAS = (
    Schema({"type": "string"}),
    Schema({"type": ["integer", "null"]}),
    Schema(_EITHER),
    Schema({"enum": ["1", 2]}),
    Schema({"type": "array", "items": {}}),
    None,
)
_TYPES = {"id": "string", "n": "integer", "m": "object", "l": "array"}
_TOOLS = [tool("x", {name: {"type": kind} for name, kind in _TYPES.items()})]


def read(steps: Generator[None, None, Any], source: Source, pieces: list[str]) -> Any:
    """What a reader returns on a text that comes in `pieces`."""
    rest = list(pieces)
    try:
        while True:
            if rest:
                source.feed(rest.pop(0), None)
            else:
                source.closed = True
            next(steps)
    except StopIteration as done:
        return done.value


def scanned(*pieces: str) -> tuple[int, str, bool]:
    """What the JSON scanner says of the value at the text's beginning: its end and "", or where
    the scanner stopped and why, and whether the text ended there."""
    source = Source()
    try:
        return read(scan_json(source, 0), source, list(pieces)), "", False
    except Unreadable as error:
        return error.pos, str(error), error.incomplete


def called(*pieces: str) -> Any:
    """What the reader of Python calls says of the text's first call, or where it stopped."""
    source = Source()
    try:
        return read(read_call(source, 0), source, list(pieces))
    except Unreadable as error:
        return error.pos, str(error), error.incomplete


def check_json(text: str) -> None:
    """The JSON scanner ends and refuses values as Python's decoder does, in pieces too."""
    found = end, problem, _ = scanned(text)
    body = text.lstrip(" \t\n\r")
    try:
        _, stop = _DECODER.raw_decode(body)
    except (ValueError, RecursionError):
        stop = -1
    if not problem and stop != end - (len(text) - len(body)):
        # Python's decoder refuses integers with too many digits; the scanner leaves that to the
        # decoder.
        assert stop == -1 and len(text) > 4300, (text, found, stop)
    if problem and stop >= 0:
        constant = any(word in text for word in ("NaN", "Infinity"))
        assert constant or text.count("[") + text.count("{") > MAX_DEPTH, (text, found, stop)
    for at in cuts(text):
        assert scanned(text[:at], text[at:]) == found, (text, at)
    assert scanned(*text) == found, text


def check_python(text: str) -> None:
    """The reader of Python's literals and calls raises nothing, and reads the same in pieces."""
    python_value(text)
    found = called(text)
    for at in cuts(text):
        assert called(text[:at], text[at:]) == found, (text, at)
    assert called(*text) == found, text


def check_values(text: str) -> None:
    """A bare value fits a JSON document, is a string by schema, and JSON is read as JSON."""
    for schema in _SCHEMAS:
        json.dumps(value_by_schema(text, schema))
    assert value_by_schema(text, _SCHEMAS[0]) == text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    plain = (
        not any(word in text for word in ("NaN", "Infinity", "\\ud", "\\uD"))
        and text.count("[") + text.count("{") <= MAX_DEPTH
    )
    if plain and not isinstance(value, str) and "inf" not in repr(value):
        assert value_by_schema(text, None) == value, text


def check_format(name: str, text: str) -> None:
    """A parser raises nothing, loses nothing, and reads the same in pieces."""
    parser = get_parser(name)
    for tools, opened in ((None, None), (_TOOLS, False), (_TOOLS, True)):
        reply = parser.parse(text, tools=tools, in_reasoning=opened)
        assert not lost(parser, text, reply), (name, text)
        for call in reply.tool_calls:
            case = (name, text)
            assert call.span is not None, case
            assert 0 <= call.span[0] <= call.span[1] <= len(text), case
            assert call.ok == (call.error is None), case
            assert not call.ok or isinstance(call.arguments, dict), case
        for cut in cuts(text)[:1]:
            for pieces in ([text[:cut], text[cut:]], list(text)):
                again, _ = in_pieces(parser, pieces, tools=tools, in_reasoning=opened)
                assert again == reply, (name, pieces)


def cuts(text: str) -> list[int]:
    """Up to four places to cut `text` at, the same each time."""
    picks = (random.Random(f"{text}{number}") for number in range(4))
    return sorted({pick.randint(0, len(text)) for pick in picks}) if text else []


SCANNERS: dict[str, Callable[[str], None]] = {
    "json": check_json,
    "python": check_python,
    "values": check_values,
}
"""What is checked of a text by itself; "blocks" is checked with a format."""


# --- the texts ------------------------------------------------------------------------------------

FOLDER = Path(__file__).parent / "corpus"
FOUND: dict[str, list[str]] = {
    scanner: json.loads((FOLDER / f"{scanner}.json").read_text(encoding="utf-8"))
    for scanner in SCANNERS
}
BLOCKS: list[tuple[str, str]] = json.loads((FOLDER / "blocks.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("scanner", SCANNERS)
def test_what_was_found_in_a_scanner_holds(scanner: str) -> None:
    assert FOUND[scanner]
    for text in FOUND[scanner]:
        SCANNERS[scanner](text)


@pytest.mark.parametrize("name", by_code([kind.name for kind in built_in_parsers()], str))
def test_what_was_found_breaks_no_other_format(name: str) -> None:
    [kind] = [kind for kind in built_in_parsers() if kind.name == name]
    opener = (*kind.openers, *kind.markers, "")[0]
    for text in (
        *(text for _, text in BLOCKS),
        *(text for texts in FOUND.values() for text in texts),
    ):
        check_format(name, text)
        check_format(name, opener + text)
