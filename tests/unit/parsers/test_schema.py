"""A client's schema of a tool cannot hold up a check, fetch anything, or make it raise."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from toolroll.parsers.reading.bounded_validator import MOST_STEPS, BoundedValidator, NotChecked
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

DRAFT = "https://json-schema.org/draft/2020-12/schema"
OLD = "http://json-schema.org/draft-07/schema#"
PATTERN = {"pattern": "^evil(a+)+$"}
STRING = {"type": "string"}


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The patterns of a schema that Python's `re` is asked for."""
    seen: list[str] = []
    for name in ("search", "match", "fullmatch", "compile"):
        real = getattr(re, name)

        def watched(pattern: Any, *rest: Any, real: Any = real) -> Any:
            if "evil" in str(pattern):
                seen.append(str(pattern))
            return real(pattern, *rest)

        monkeypatch.setattr(re, name, watched)
    yield seen


def status(schema: Any, arguments: Any) -> CallStatus:
    """What becomes of a call with `arguments`."""
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    (call,) = get_parser("hermes").parse(text, tools=offered).tool_calls
    return call.status


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": PATTERN}},
        {"properties": {"a": {"allOf": [{"not": {**PATTERN, "minLength": 99}}]}}},
        {"propertyNames": PATTERN},
        {"patternProperties": {"^evil(a+)+$": {}}},
        {"patternProperties": {"^evil(a+)+$": {}}, "additionalProperties": False},
        {"patternProperties": {"^evil(a+)+$": {}}, "unevaluatedProperties": False},
        {"allOf": [{"patternProperties": {"^evil(a+)+$": {}}}], "unevaluatedProperties": False},
        {"$schema": DRAFT, "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": PATTERN}},
        {"$schema": DRAFT, "properties": {"b": {"$ref": "#"}, "a": PATTERN}},
        {"properties": {"a": {"$schema": DRAFT, **PATTERN}}},
        {"properties": {"a": {"$schema": OLD, **PATTERN}}},
    ],
)
def test_no_pattern_of_a_schema_is_evaluated(schema: Any, matched: list[str]) -> None:
    assert status(schema, {"a": "evil" + "a" * 20 + "!", "b": {"a": "evil"}}) is CallStatus.OK
    assert matched == []


def test_beside_a_pattern_everything_else_is_checked() -> None:
    text = {**STRING, "pattern": "("}
    schema = {"properties": {"a": text}, "patternProperties": {"^x": {}}, "required": ["a"]}
    assert status(schema, {"a": "x"}) is CallStatus.OK
    assert status(schema, {"a": 1}) is CallStatus.BAD_ARGUMENTS
    assert status(schema, {}) is CallStatus.BAD_ARGUMENTS
    old = {"$schema": OLD, "$defs": {"a": STRING}, "properties": {"a": {"$ref": "#/$defs/a"}}}
    assert status(old, {"a": 1}) is CallStatus.BAD_ARGUMENTS


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **_: asked.append(given) or [])  # type: ignore[func-returns-value]
    monkeypatch.setattr(socket, "create_connection", lambda *given, **_: asked.append(given))
    inner = {"x": {"$id": "http://127.0.0.1:9/y", "z": {"$ref": "#/w"}}}
    address = "http://127.0.0.1:9/x"
    for schema in ({"$ref": address}, {"$id": address, "$ref": "y"}, {**inner, "$ref": "#/x/z"}):
        assert status(schema, {"a": 1}) is CallStatus.OK
    assert asked == []


def deep(levels: int) -> Any:
    """A schema that is nested `levels` deep."""
    schema: Any = STRING
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/nowhere"},
        {"$ref": "#nowhere"},
        {"$dynamicRef": "#nowhere"},
        {"$ref": "#/x/no_number", "x": [{}]},
        {"$ref": "http://["},
        {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"},
        {"properties": {"n": {"multipleOf": 0.1}}},
        {"properties": {"a": {"type": "string", "pattern": "a{99999999999999}"}}},
        {"properties": {"a": {"type": ["string", 3]}}},
        deep(100),
        deep(200),
        deep(400),
    ],
)
def test_no_schema_makes_a_check_raise(schema: Any) -> None:
    assert status(schema, {"a": "x", "n": 10**400}) is CallStatus.OK


DOUBLED = {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(60)}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$defs": {**DOUBLED, "60": {}}, "$ref": "#/$defs/0"}, 1),
        ({"uniqueItems": True}, [{"a": number} for number in range(3000)]),
        ({"items": {"enum": [{"a": number} for number in range(1900)]}}, [[0]] * 3000),
        ({"items": {"anyOf": [STRING] * 1900}}, list(range(3000))),
        ({"allOf": [STRING] * 1900}, ["x" * 100] * 1000),
    ],
    ids=["references", "unique items", "an enum", "alternatives", "long messages"],
)
def test_a_check_is_bounded(schema: Any, value: Any) -> None:
    with pytest.raises(NotChecked, match=f"more than {MOST_STEPS} steps"):
        BoundedValidator(schema).first_problem(value)


NOT_ONE = ({"allOf": [STRING] * 2001}, {"type": [*range(10)]}, {"type": 3}, {"type": "dict"})


@pytest.mark.parametrize("schema", NOT_ONE)
def test_what_is_no_schema_or_too_large_checks_nothing(schema: Any) -> None:
    with pytest.raises(NotChecked):
        BoundedValidator(schema)


def test_an_honest_schema_has_room() -> None:
    row = {"type": "object", "properties": {"n": {"minimum": 0}}}
    schema = {"properties": {"rows": {"type": "array", "minItems": 1, "items": row}}}
    many = [{"n": number} for number in range(10_000)]
    validator = BoundedValidator(schema)
    assert validator.first_problem({"rows": many}) is None
    problem = validator.first_problem({"rows": [*many, {"n": -1}]})
    assert problem is not None and "-1 is less than the minimum" in problem.message


PARAMETERS = {
    "type": "object",
    "properties": {
        "user_id": {"type": "string", "description": "who"},
        "bags": {"type": "integer"},
        "cabin": {"type": "string", "enum": ["economy", "business"]},
        "flights": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"date": {"type": "string"}},
                "required": ["date"],
            },
        },
    },
    "required": ["user_id"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        ({"user_id": "a", "bags": 2, "cabin": "economy", "flights": [{"date": "x"}]}, True),
        ({"user_id": "a", "bags": True}, False),
        ({"user_id": "a", "cabin": "first"}, False),
        ({"user_id": "a", "flights": [{}]}, False),
        ({"user_id": "a", "more": 1}, False),
        ({"bags": 1}, False),
        ({"user_id": "a", "bags": 1.5}, False),
        ({"user_id": "a", "bags": 2.0}, True),  # JSON schema takes 2.0 for an integer
    ],
)
def test_the_schema_of_an_ordinary_tool_is_checked(arguments: dict[str, Any], valid: bool) -> None:
    assert status(PARAMETERS, arguments) is (CallStatus.OK if valid else CallStatus.BAD_ARGUMENTS)
