"""`Validator`: checks values against untrusted JSON schemas (draft 2020-12).

Invariants: a schema's regular expressions are ignored, and nothing is fetched for a `$ref`. A check
cannot be stopped once it has begun, so the work that it may take is bounded before. If the schema
is too large or not valid, or if a check may take too long, `NotChecked` is raised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from heapq import nsmallest
from itertools import chain
from typing import Any

from jsonschema_rs import Draft202012Validator, ReferencingError, ValidationError
from jsonschema_rs import ValidationErrorKind as Kind

from toolroll.parsers.reading.resolve import NOT_A_SCHEMA, Schema

MOST_OBJECTS = 2000
"""The maximum number of objects in a schema."""
MOST_DEEP = 50
"""The maximum nesting of a schema in which each reference is replaced."""
MOST_COMPILED = 10_000
"""The maximum size of the parts with `unevaluatedItems` or `unevaluatedProperties`. The compiler
replaces the references in them, which takes 0.1 s for this size.
"""
MOST_WORK = 1_000_000
"""The maximum work of a check: the size of the schema times the size of the value. A unit of work
takes about 50 ns, and at most 0.5 us.
"""
MOST_ERRORS = 20_000
"""The maximum work for which the errors are listed. An error takes up to 20 us."""

_NO_FIT = "they do not match the tool's JSON schema"
_PATTERNS = ("pattern", "patternProperties")
_BY_PATTERN = ("additionalProperties", "unevaluatedProperties")
_OLD = "dependencies"  # the library checks it, but draft 2020-12 does not have it
_HERE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_FOR_EACH = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("items", "contains", "unevaluatedItems"),
)
_FOR_ONE = ("properties", "prefixItems")  # one part of these applies to a member, at most
_NUMERIC = {"const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


class NotChecked(Exception):
    """The schema cannot be checked, or a value cannot be checked against the schema."""


class Validator:
    """Checks values against `schema`. Raises `NotChecked` if it is too large or not valid."""

    def __init__(self, schema: Schema) -> None:
        document = {name: part for name, part in schema.node.items() if name != "$schema"}
        objects = list(_objects(document))
        _refuse(objects)
        named = any("patternProperties" in node for node in objects)
        ignored = (_OLD, *_PATTERNS, *(_BY_PATTERN if named else ()))
        keywords: dict[str, Any] = dict.fromkeys(ignored, _Ignored)
        try:
            self._expansion = _Expansion(schema)
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
    """A schema with each reference replaced, except inside the schema that it refers to. `size`:
    how many of its parts apply, at most, to a leaf of a value and to the values around it.
    `recursive`: whether a reference is not replaced.
    """

    def __init__(self, schema: Schema) -> None:
        self.recursive = False
        self._sizes: dict[int, int] = {}
        self._here: dict[int, list[int]] = {}
        self._compiled = 0
        self.size = self._size(schema, 0)
        TopologicalSorter(self._here).prepare()  # CycleError: a schema refers to itself

    def _size(self, schema: Schema, depth: int) -> int:
        """Return the size of `schema`. `depth`: the number of schemas around it."""
        node, key = schema.node, id(schema.node)
        if not isinstance(node, Mapping):
            return 1
        if key in self._sizes:
            self.recursive = self.recursive or not self._sizes[key]
            return self._sizes[key]
        if depth > MOST_DEEP:  # before Python's recursion limit, at which `referencing` aborts
            raise NotChecked(f"the schema is nested more than {MOST_DEEP} deep")
        self._sizes[key] = 0
        here = [*map(schema.target, schema.references()), *_parts(schema, _HERE)]
        self._here[key] = [id(part.node) for part in here]
        same, each, one = (
            [self._size(part, depth + 1) for part in parts]
            for parts in (here, _parts(schema, _FOR_EACH), _parts(schema, _FOR_ONE))
        )
        size = _weight(node) + sum(same) + sum(each) + max(one, default=0)
        if not node.keys().isdisjoint(("unevaluatedItems", "unevaluatedProperties")):
            size *= 3  # the parts for the same value are checked again
            self._compiled += size
            if self._compiled > MOST_COMPILED:
                raise NotChecked(f"the schema expands to more than {MOST_COMPILED} parts")
        self._sizes[key] = size
        return size


def _parts(schema: Schema, keywords: Iterable[str]) -> Iterator[Schema]:
    """Yield the schemas in the `keywords` of `schema`."""
    for keyword in keywords:
        content = schema.node.get(keyword, [])
        if keyword in ("properties", "dependentSchemas") and isinstance(content, Mapping):
            content = [*content.values()]
        parts = content if isinstance(content, list) else [content]
        yield from (schema.within(part) for part in parts if isinstance(part, Mapping))


def _weight(node: Mapping[str, Any]) -> int:
    """Return the size of `node` without its parts."""
    options = node.get("enum")
    compared = len(_NUMERIC & node.keys())
    if isinstance(options, list) and len({type(option) for option in options} | {str}) > 1:
        compared += len(options)  # strings are not compared, but looked up
    return 1 + 16 * compared + len(str(node)) // 400  # an error may contain a part of the schema


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each object in `schema`."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            yield node
            left += node.values()
        elif isinstance(node, list):
            left += node


def _refuse(objects: list[Mapping[str, Any]]) -> None:
    """Raise `NotChecked` if a schema with these `objects` is not checked."""
    if len(objects) > MOST_OBJECTS:
        raise NotChecked(f"the schema has {len(objects)} objects, more than {MOST_OBJECTS}")
    if any(isinstance(node.get("$schema"), str) for node in objects):
        raise NotChecked("a part of the schema names its own draft")
    anchors = [str(node["$dynamicAnchor"]) for node in objects if "$dynamicAnchor" in node]
    if len(anchors) > len(set(anchors)):
        raise NotChecked("two parts of the schema have the same dynamic anchor")


def _measured(value: Any) -> tuple[int, int]:
    """Return the size of `value`, its keys included, and how deep it is nested. Integers beyond 64
    bits count more than other values, because `uniqueItems` compares all pairs of them.
    """
    size, words, depth, level = 0, 0, -1, [value]
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
            elif isinstance(item, int):
                words += item.bit_length() // 64
        level = below
    return size + 8 * words * words, depth


def _best(errors: Iterable[ValidationError]) -> ValidationError:
    """Return the error of the value that is nested least. If no alternative fits this value, return
    the error in the alternative that fits best, if there is one.
    """
    best = max(errors, key=_relevance)
    while isinstance(best.kind, Kind.AnyOf | Kind.OneOfNotValid):
        inner = nsmallest(2, chain.from_iterable(best.kind.context), key=_relevance)
        if not inner or (len(inner) == 2 and _relevance(inner[0]) == _relevance(inner[1])):
            break
        best = inner[0]
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
