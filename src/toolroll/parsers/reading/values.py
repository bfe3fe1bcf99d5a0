"""Decode values that a format writes as bare text (`<parameter=n>3</parameter>`), with the
parameter's JSON schema.

Such formats write strings without quotes and all other values as JSON (or, in some templates, as
Python). So only the schema distinguishes `3` from `"3"`. Invariant: decoding never fails. If a
value fits no type of the schema, its type is guessed. The check against the schema then reports the
mismatch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from toolroll.parsers.reading.json_text import decode
from toolroll.parsers.reading.python_text import CONSTANTS, python_value

# One check for each JSON type. A boolean is not a number. For an integer, both "integer" and
# "number" are true.
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_SPELLED = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number",
    "double": "number", "bool": "boolean",
    "dict": "object", "map": "object", "list": "array", "tuple": "array",
}  # fmt: skip
_NUMBER = re.compile(r"[-+]?[0-9.][0-9.eE+-]*")


def typed(text: str, schema: Any) -> Any:
    """Return the value that `text` represents under `schema`. If `schema` is not a mapping or names
    no type, guess the type.

    If the schema allows several types, the most specific type that fits is used, and string comes
    last.
    """
    if not isinstance(schema, Mapping):
        return guessed(text)
    enum = schema.get("enum")
    if isinstance(enum, list) and text in enum:
        return text
    kinds = kinds_of(schema)
    if kinds is None:
        return guessed(text)
    if kinds == {"string"}:
        return text
    value = guessed(text)
    if _kind(value) in kinds or ("number" in kinds and _kind(value) == "integer"):
        return value
    return text if "string" in kinds else value


def guessed(text: str) -> Any:
    """Return `text` decoded if it is a number, a constant, an object or an array. Otherwise return
    `text`.
    """
    bare = text.strip()
    if bare in CONSTANTS:
        return CONSTANTS[bare]
    if bare[:1] in ("{", "["):
        try:
            return decode(bare)
        except ValueError:
            found, value = python_value(bare)
            return value if found else text
    if _NUMBER.fullmatch(bare):
        try:
            return decode(bare)
        except ValueError:
            return text
    return text


def kinds_of(schema: Any) -> frozenset[str] | None:
    """Return the types that `schema` allows, or None if they are unknown."""
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else None
    if names is not None:
        return _known(names)
    if "enum" in schema:
        enum = schema["enum"]
        return frozenset(map(_kind, enum if isinstance(enum, list) else [enum]))
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        if isinstance(branches, list) and branches:
            return _union([kinds_of(branch) for branch in branches], every=word != "allOf")
    return None


def _known(names: list[Any]) -> frozenset[str] | None:
    kinds = [
        _SPELLED.get(name.lower(), name.lower()) if isinstance(name, str) else "" for name in names
    ]
    return frozenset(kinds) if kinds and all(kind in TYPES for kind in kinds) else None


def _union(found: list[frozenset[str] | None], *, every: bool) -> frozenset[str] | None:
    known = [kinds for kinds in found if kinds is not None]
    if not known or (every and len(known) < len(found)):
        return None
    return frozenset().union(*known)


def _kind(value: Any) -> str:
    return next((name for name, fits in TYPES.items() if fits(value)), "")
