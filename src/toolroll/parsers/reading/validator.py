"""`Validator`: checks values against untrusted JSON schemas (draft 2020-12).

Invariants: a schema's regular expressions are ignored, and nothing is fetched for a `$ref`. A check
cannot be stopped once it has begun, so the sizes of the schema and of the value are limited. If the
schema is too large or not valid, or if the value is too large for it, `NotChecked` is raised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from heapq import nsmallest
from itertools import chain
from typing import Any

from jsonschema_rs import Draft202012Validator, ReferencingError, ValidationError
from jsonschema_rs import ValidationErrorKind as Kind

from toolroll.parsers.reading.resolve import NOT_A_SCHEMA, Schema

MOST_DEEP = 100
"""The maximum nesting of objects and arrays in a schema in which each reference is replaced."""
MOST_PARTS = 10_000
"""The maximum size of this schema (`_Expansion`). It takes up to 0.1 s to compile."""
MOST_WORK = 1_000_000
"""The maximum product of the sizes of this schema and of a value. A check takes up to 1.5 s."""
MOST_ERRORS = 40_000
"""The maximum product for which the errors are listed, up to 20,000 errors of 20 us."""

_NO_FIT = "they do not match the tool's JSON schema"
_PATTERNS = ("pattern", "patternProperties")
_BY_PATTERN = ("additionalProperties", "unevaluatedProperties")
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
_COSTS = {bool: 1, type(None): 1, int: 8, float: 64}  # a float is compared as a fraction
_OLD = "dependencies"  # the library checks it, but draft 2020-12 does not have it


class NotChecked(Exception):
    """The schema cannot be checked, or a value cannot be checked against the schema."""


class Validator:
    """Checks values against `schema`. Raises `NotChecked` if it is too large or not valid."""

    def __init__(self, schema: Schema) -> None:
        document = {name: part for name, part in schema.node.items() if name != "$schema"}
        try:
            self._expansion = _Expansion(schema)
            by_pattern = _BY_PATTERN if self._expansion.has_patterns else ()
            keywords: dict[str, Any] = dict.fromkeys((_OLD, *_PATTERNS, *by_pattern), _Ignored)
            self._validator = Draft202012Validator(
                document,
                keywords=keywords,
                offline=True,
                validate_formats=False,
            )
        except (ReferencingError, *NOT_A_SCHEMA) as error:
            raise NotChecked(f"the schema cannot be applied: {error}") from error

    def problem(self, value: Any) -> str | None:
        """Return where and how `value` does not fit, or None if it fits. Raises `NotChecked` if
        `value` cannot be checked.
        """
        size, depth = _measured(value)
        work = size * self._expansion.size
        if work > MOST_WORK:
            raise NotChecked(f"the check may take more than {MOST_WORK} steps")
        try:
            if self._validator.is_valid(value):
                return None
        except ValueError as error:  # nested too deep, or not JSON
            raise NotChecked(str(error)) from error
        if self._expansion.recursive:  # `is_valid` remembers results, `iter_errors` does not
            work *= self._expansion.size**depth
        if work > MOST_ERRORS:
            return _NO_FIT
        try:
            return _text(_best(self._validator.iter_errors(value)))
        except Exception:  # noqa: BLE001 - an error without a text is an error
            return _NO_FIT


class _Ignored:
    """A keyword that checks nothing."""

    def __init__(self, schema: Any, keyword: Any, path: Any) -> None:
        pass

    def validate(self, instance: Any) -> None:
        pass


class _Expansion:
    """A schema in which each reference is replaced, except inside the schema that it refers to.

    `size`: the number of its JSON values. Long texts and numbers, which are slow to compare, count
    more. `unevaluatedItems` and `unevaluatedProperties` check the parts around them again, and
    the library replaces the references in them, so what is in an object with them counts thrice.
    `recursive`: whether a reference is not replaced.
    """

    def __init__(self, schema: Schema) -> None:
        self.size = 0
        self.recursive = False
        self.has_patterns = False
        self._read: dict[int, tuple[int, int, list[Schema]]] = {}
        self._add(schema, (), 1)

    def _add(self, schema: Schema, around: tuple[int, ...], weight: int) -> None:
        """Add `schema`, inside the objects and arrays `around`. Raises `NotChecked` or one of
        `NOT_A_SCHEMA`.
        """
        key = id(schema.node)
        if key in around:
            self.recursive = True
            return
        if len(around) > MOST_DEEP:
            raise NotChecked(f"the schema is nested more than {MOST_DEEP} deep")
        if key not in self._read:
            self._read[key] = self._parts(schema)
        size, times, parts = self._read[key]
        self.size += weight * times * size
        if self.size > MOST_PARTS:
            raise NotChecked(f"the schema has more than {MOST_PARTS} parts")
        for part in parts:
            self._add(part, (*around, key), weight * times)

    def _parts(self, schema: Schema) -> tuple[int, int, list[Schema]]:
        """Return the size of an object or array without the objects and arrays in it, how many
        times it counts, and these objects and arrays, those that it refers to included.
        """
        node, times, targets = schema.node, 1, list[Schema]()
        values = node if isinstance(node, list) else [*node.values()]
        if isinstance(node, Mapping):
            if "$dynamicAnchor" in node or (self._read and isinstance(node.get("$schema"), str)):
                raise NotChecked("a part of the schema has a dynamic anchor or its own draft")
            self.has_patterns |= "patternProperties" in node
            times = 1 if node.keys().isdisjoint(_UNEVALUATED) else 3
            targets = [schema.target(reference) for reference in schema.references()]
        parts = [*targets, *map(schema.within, values)]
        parts = [part for part in parts if isinstance(part.node, Mapping | list)]
        return 1 + sum(map(_cost, values)), times, parts


def _cost(value: Any) -> int:
    """Return the size of `value`, or 0 if it is an object or an array."""
    if isinstance(value, str):
        return 1 + len(value) // 400  # an error may contain it
    return _COSTS.get(type(value), 0)


def _measured(value: Any) -> tuple[int, int]:
    """Return the size of `value`, its keys included, and how deep it is nested. Integers beyond 64
    bits count most, because `uniqueItems` compares all pairs of them.
    """
    size, int_words, depth, level = 0, 0, -1, [value]
    while level:
        depth += 1
        size += len(level)
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                size += len(item) // 1000
            elif isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, float):
                size += 3
            elif isinstance(item, int):
                int_words += item.bit_length() // 64
        level = below
    return size + 8 * int_words * int_words, depth


def _best(errors: Iterable[ValidationError]) -> ValidationError:
    """Return the error of the value that is nested least. If no alternative fits this value, return
    the error in the alternative that fits best, if there is one.
    """
    best = max(errors, key=_relevance)
    while isinstance(best.kind, Kind.AnyOf | Kind.OneOfNotValid):
        nested = nsmallest(2, chain.from_iterable(best.kind.context), key=_relevance)
        if not nested or (len(nested) == 2 and _relevance(nested[0]) == _relevance(nested[1])):
            break
        best = nested[0]
    return best


def _relevance(error: ValidationError) -> tuple[int, list[tuple[bool, str | int]], bool, bool]:
    path = [(isinstance(part, str), part) for part in error.instance_path]
    return -len(path), path, error.kind.name not in ("anyOf", "oneOf"), error.kind.name == "type"


def _text(error: ValidationError) -> str:
    """Return the path and the message of `error`. The message has at most 300 characters."""
    keyword = error.schema_path[-1] if error.schema_path else ""
    message = error.message
    match error.kind:
        case Kind.Enum(options=options):  # the library's message does not list all of them
            message = f"{_json(error.instance)} is not one of {', '.join(map(_json, options))}"
        case Kind.FalseSchema() if keyword == "additionalProperties":
            message = "no properties are allowed"
        case Kind.Contains():
            message = f"too few or too many items fit the schema of 'contains' ({keyword})"
    path = ".".join(map(str, error.instance_path))
    message = message if len(message) <= 300 else message[:297] + "..."
    return f"{path}: {message}" if path else message


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
