"""Coverage-guided fuzzing of the scanners with atheris, which must be installed for it.

    python tests/support/fuzz_scanners.py -max_total_time=60

What must hold: the JSON scanner ends a value where Python's decoder does and refuses what it refuses; the Python scanner, the typed
values and the formats built on them raise nothing.
"""

from __future__ import annotations

import json
import sys

import atheris

with atheris.instrument_imports(include=["toolroll.parsers"]):
    from toolroll.parsers.json_text import MAX_DEPTH, Scanned, scan_json
    from toolroll.parsers.python_text import python_value
    from toolroll.parsers.registry import get_parser
    from toolroll.parsers.source import Source
    from toolroll.parsers.values import typed

_DECODER = json.JSONDecoder()
_PARSERS = tuple(get_parser(name) for name in ("hermes", "qwen3_coder", "gemma4", "lfm2", "pythonic", "gpt-oss", "deepseekv3", "muse"))
_EITHER = {"anyOf": [{"type": "object"}, {"type": "array"}]}
_SCHEMAS = ({"type": "string"}, {"type": ["integer", "null"]}, _EITHER, {"enum": ["1", 2]}, None)


def scanned(text: str) -> Scanned:
    """What the JSON scanner says of the value at the text's beginning."""
    source = Source()
    source.feed(text, None)
    source.closed = True
    steps = scan_json(source, 0)
    try:
        while True:
            next(steps)
    except StopIteration as done:
        found: Scanned = done.value
        return found


def check(data: bytes) -> None:
    """One input."""
    text = data.decode("utf-8", "ignore")
    found = scanned(text)
    body = text.lstrip(" \t\n\r")
    try:
        _, stop = _DECODER.raw_decode(body)
    except (ValueError, RecursionError):
        stop = -1
    if found.problem is None and stop != found.stop - (len(text) - len(body)):
        # Python's decoder refuses integers of more digits than it reads; the scanner leaves that to the decoder.
        assert stop == -1 and len(text) > 4300, (text, found, stop)
    if found.problem is not None and stop >= 0:
        constant = any(word in text for word in ("NaN", "Infinity"))
        assert constant or text.count("[") + text.count("{") > MAX_DEPTH, (text, found, stop)
    python_value(text)
    for schema in _SCHEMAS:
        typed(text, schema)
    for parser in _PARSERS:
        parser.parse(text)
        parser.parse((*parser.openers, *parser.markers, "")[0] + text)


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
