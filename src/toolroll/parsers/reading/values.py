"""Decode values that a format writes as bare text (`<parameter=n>3</parameter>`), with the
parameter's JSON schema.

Such formats write strings without quotes and all other values as JSON (or, in some templates, as
Python). So only the schema distinguishes `3` from `"3"`. Invariant: decoding never fails. If a
value fits no type of the schema, its type is guessed. The check against the schema then reports the
mismatch.
"""

from __future__ import annotations

import re
from typing import Any

from toolroll.parsers.reading.json_text import decode
from toolroll.parsers.reading.python_text import CONSTANTS, python_value
from toolroll.parsers.reading.resolve import Schema, kind_of

_NUMBER = re.compile(r"[-+]?[0-9.][0-9.eE+-]*")


def value_by_schema(text: str, schema: Schema | None) -> Any:
    """Return the value that `text` represents under `schema`. If `schema` is None or names no type,
    guess the type.

    If the schema allows a string, the value is the text itself, with two exceptions: `null` is null
    if the schema also allows null, and a text that `enum` or `const` excludes is decoded if the
    decoded value has another type that the schema allows.
    """
    if schema is None or (allowed := schema.allowed).kinds is None:
        return guess_value(text)
    if allowed.kinds == {"string"}:
        return text
    value = guess_value(text)
    if "string" not in allowed.kinds:
        return value
    excluded = allowed.strings is not None and text not in allowed.strings
    return value if kind_of(value) in allowed.kinds and (value is None or excluded) else text


def guess_value(text: str) -> Any:
    """Return `text`, decoded if it is a number, a constant, an object or an array."""
    bare = text.strip()
    if bare in CONSTANTS:
        return CONSTANTS[bare]
    if bare[:1] in ("{", "["):
        try:
            return decode(bare)
        except ValueError:
            is_literal, value = python_value(bare)
            return value if is_literal else text
    if _NUMBER.fullmatch(bare):
        try:
            return decode(bare)
        except ValueError:
            return text
    return text
