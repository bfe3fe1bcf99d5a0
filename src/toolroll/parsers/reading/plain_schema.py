"""A fast check that tool arguments fit a simple JSON schema.

Invariant: if the check passes, a JSON-schema validator (draft 2020-12) finds no error. If it does
not pass, or if the schema is not simple, the validator decides and writes the error message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Fits = Callable[[Any], bool]

_NOTES = frozenset(
    ("description", "title", "default", "examples", "$schema", "$comment", "deprecated")
)
_KNOWN = _NOTES | {"type", "enum", "properties", "required", "items", "additionalProperties"}

# One check for each JSON type. A boolean is not a number. For an integer, both "integer" and
# "number" are true.
TYPES: dict[str, Fits] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def plain_fits(schema: Any) -> Fits | None:
    """Return a function that returns True for values that certainly fit `schema`. Return None if
    `schema` is not simple.
    """
    if not isinstance(schema, Mapping) or not schema.keys() <= _KNOWN:
        return None
    parts = [_of_type(schema), _of_enum(schema), _of_items(schema), _of_object(schema)]
    if any(part is None for part in parts):
        return None
    tests = [part for part in parts if part is not None and part is not _anything]
    return lambda value: all(test(value) for test in tests)


def _anything(value: Any) -> bool:
    return True


def _of_type(schema: Mapping[str, Any]) -> Fits | None:
    kind = schema.get("type")
    return _anything if "type" not in schema else TYPES.get(kind) if isinstance(kind, str) else None


def _of_enum(schema: Mapping[str, Any]) -> Fits | None:
    """Return a check for an enum of strings. Any other enum is left to the validator, because JSON
    schema and Python differ on whether 1, 1.0 and true are equal.
    """
    if "enum" not in schema:
        return _anything
    values = schema["enum"]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return lambda value: isinstance(value, str) and value in values


def _of_items(schema: Mapping[str, Any]) -> Fits | None:
    if "items" not in schema:
        return _anything
    fits = plain_fits(schema["items"])
    return (
        None if fits is None else lambda value: not isinstance(value, list) or all(map(fits, value))
    )


def _of_object(schema: Mapping[str, Any]) -> Fits | None:
    given, required, more = (
        schema.get("properties", {}),
        schema.get("required", []),
        schema.get("additionalProperties", True),
    )
    if (
        not isinstance(given, Mapping)
        or not isinstance(required, list)
        or not isinstance(more, bool)
    ):
        return None
    if not all(isinstance(name, str) for name in required):
        return None
    properties = {name: plain_fits(inner) for name, inner in given.items()}
    if any(fits is None for fits in properties.values()):
        return None

    def fits(value: Any) -> bool:
        if not isinstance(value, dict):
            return True
        if not all(name in value for name in required):
            return False
        for name, entry in value.items():
            inner = properties.get(name)
            if not more if inner is None else not inner(entry):
                return False
        return True

    return fits if given or required or not more else _anything
