"""A client's schema of a tool cannot hold up a check, fetch anything, or make it raise."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from toolroll.parsers.reading.resolve import Schema
from toolroll.parsers.reading.validator import MOST_PARTS, MOST_WORK, NotChecked, Validator
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

DRAFT = "https://json-schema.org/draft/2020-12/schema"
OLD = "http://json-schema.org/draft-07/schema#"
PATTERN = {"pattern": "^evil(a+)+$"}
STRING, NULL = {"type": "string"}, {"type": "null"}
NO_REFERENCE = ({"$ref": "#/nowhere"}, {"$ref": "#nowhere"}, {"$dynamicRef": "#nowhere"})
DOUBLED = {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(60)}
NOT_EMPTY = {"maxProperties": 0, "maxLength": 0, **STRING}
ALTERNATIVES = {"items": {"anyOf": [STRING] * 1900}}
TOO_LARGE = f"more than {MOST_PARTS} parts"
NOT_LISTED = "they do not match the tool's JSON schema"
EIGHT = '"a", "b", "c", "d", "e", "f", null, 3'
ROW = {"type": "object", "properties": {"n": {"minimum": 0}}}
ROWS = {"properties": {"rows": {"type": "array", "minItems": 1, "items": ROW}}}
ROOM = [{"n": number} for number in range(10_000)]
POINT = {"type": "object", "properties": {"kind": {"const": "point"}}, "required": ["kind", "x"]}
LINE = {"type": "object", "properties": {"kind": {"const": "line"}}, "required": ["kind", "to"]}
# What a schema that refers to itself refers to fits, so an `anyOf` with it always does.
ITSELF = {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"$ref": "#", **STRING}}}
ALWAYS = {"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"oneOf": [{"$ref": "#"}]}}}


def status(schema: Any, arguments: Any) -> CallStatus:
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    (call,) = get_parser("hermes").parse(text, tools=offered).tool_calls
    return call.status


def deep(levels: int) -> Any:
    """A schema that is nested `levels` deep."""
    schema: Any = STRING
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": PATTERN}},
        {"patternProperties": {"^evil(a+)+$": {}}},
        {"patternProperties": {"^evil(a+)+$": {}}, "additionalProperties": False},
        {"patternProperties": {"^evil(a+)+$": {}}, "unevaluatedProperties": False},
        {"allOf": [{"patternProperties": {"^evil(a+)+$": {}}}], "unevaluatedProperties": False},
        {"$schema": DRAFT, "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": PATTERN}},
        {"properties": {"a": {"$schema": DRAFT, **PATTERN}}},
        {"properties": {"a": {"$schema": OLD, **PATTERN}}},
        *NO_REFERENCE,
        {"$ref": "#/x/no_number", "x": [{}]},
        {"$ref": "http://["},
        {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"},
        {"properties": {"n": {"multipleOf": 0.1}}},
        {"properties": {"a": {"type": "string", "pattern": "a{99999999999999}"}}},
        {"properties": {"a": {"type": ["string", 3]}}},
        *map(deep, (100, 200, 400)),
    ],
)
def test_no_pattern_is_evaluated_and_no_schema_raises(schema: Any) -> None:
    value = {"a": "evil" + "a" * 20 + "!", "b": {"a": "evil"}, "n": 10**400}
    assert status(schema, value) is CallStatus.OK


def test_beside_a_pattern_everything_else_is_checked() -> None:
    text = {**STRING, "pattern": "("}
    schema = {"properties": {"a": text}, "patternProperties": {"^x": {}}, "required": ["a"]}
    assert status(schema, {"a": "x"}) is CallStatus.OK
    assert status(schema, {"a": 1}) is CallStatus.BAD_ARGUMENTS
    assert status(schema, {}) is CallStatus.BAD_ARGUMENTS
    old = {"$schema": OLD, "$defs": {"a": STRING}, "properties": {"a": {"$ref": "#/$defs/a"}}}
    assert status(old, {"a": 1}) is CallStatus.BAD_ARGUMENTS


def test_nothing_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(json.dumps({"type": "string"}), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        server = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for address in (server, (tmp_path / "x").as_uri()):
            inner = {"x": {"$id": f"{address}/y", "z": {"$ref": "/w"}}}
            for schema in (
                {"$ref": address},
                {"$id": address, "$ref": "y"},
                {**inner, "$ref": "#/x/z"},
                {"$schema": address, "$ref": address},
                {"$dynamicRef": address},
                {"$defs": {"unused": {"$ref": address}}},
            ):
                assert status({**schema, "properties": {"a": True}}, {"a": 1}) is CallStatus.OK
        with pytest.raises(BlockingIOError):  # no connection has arrived
            listener.accept()


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else 1


def validator(schema: Any) -> Validator:
    return Validator(Schema.of(schema, valid=True))


def doubled(levels: int, **more: Any) -> Any:
    """A schema with 2 ** `levels` references."""
    first = 60 - levels
    steps = {name: part for name, part in DOUBLED.items() if int(name) >= first}
    return {"$defs": {**steps, "60": {"minimum": 0}}, "$ref": f"#/$defs/{first}", **more}


IN_ITEMS = {"items": doubled(6), "$defs": doubled(6)["$defs"]}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"uniqueItems": True}, [2**70 + number for number in range(3000)]),
        ({"items": {"enum": [{"a": number} for number in range(900)]}}, [[0]] * 3000),
        (ALTERNATIVES, list(range(3000))),
        ({"items": {"multipleOf": 0.1}}, [0.1] * 200_000),
        (IN_ITEMS, [1] * 3000),
        # what is not JSON is not checked
        (NOT_EMPTY, "\ud800"),
        (NOT_EMPTY, {1: 2}),
    ],
)
def test_a_check_is_bounded(schema: Any, value: Any) -> None:
    words = "" if schema is NOT_EMPTY else f"more than {MOST_WORK} steps"
    with pytest.raises(NotChecked, match=words):
        validator(schema).problem(value)


def others() -> Any:
    return {"allOf": [{"$ref": f"#/$defs/{number}"} for number in range(10)], **STRING}


LARGE = (
    doubled(24),
    {"allOf": [STRING] * MOST_PARTS},
    doubled(8, unevaluatedProperties=False),
    doubled(8, unevaluatedItems=False),
    {"properties": {str(n): doubled(6, unevaluatedItems=False) for n in range(9)}}
    | {"$defs": doubled(6)["$defs"]},
    {"$defs": {str(number): others() for number in range(10)}, "$ref": "#/$defs/0"},
)


@pytest.mark.parametrize(
    ("value", "size"),
    [(None, 1), (True, 1), ("x" * 399, 1), ("x" * 400, 2), (7, 8), (0.5, 64), ({}, 1), ([], 1)],
)
def test_the_size_of_a_schema_is_the_number_of_its_values(value: Any, size: int) -> None:
    most = (MOST_PARTS - 2) // size  # beside the schema and the array
    validator({"examples": [value] * most})
    with pytest.raises(NotChecked):
        validator({"examples": [value] * (most + 1)})


def unevaluated(levels: int) -> Any:
    """A schema of which each level takes 2.6 times as long."""
    inner = unevaluated(levels - 1) if levels else {"properties": {"a": True}}
    return {"allOf": [inner], "unevaluatedProperties": False} if levels else inner


NOT_ONE = (
    {"type": 3},
    {"$dynamicAnchor": "x"},
    {"$defs": {"x": {"$schema": OLD}}},
    deep(51),
    unevaluated(12),
    doubled(60),
    {"$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(1900)}, "$ref": "#/$defs/0"},
)


@pytest.mark.parametrize(
    ("schema", "words"), [*((each, TOO_LARGE) for each in LARGE), *((each, "") for each in NOT_ONE)]
)
def test_what_is_no_schema_or_too_large_checks_nothing(schema: Any, words: str) -> None:
    with pytest.raises(NotChecked, match=words):
        validator(schema)


MANY = [
    (ALTERNATIVES, list(range(100))),
    ({"allOf": [STRING] * 1900}, ["x" * 100] * 100),
    ({"items": {"const": ["y" * 50] * 3000}}, ["x"] * 40),
    (IN_ITEMS, [-1] * 50),
    ({"anyOf": [{"properties": {"a": {"$ref": "#"}}}] * 2, "type": "object"}, nested(90)),
    # those of a value that is no JSON cannot be listed
    (STRING, {"a": {1: 2}}),
    (STRING, {"a": "\ud800"}),
]


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"required": ["a"], "properties": {"b": STRING}}, {"b": 1}, '"a" is a required property'),
        ({"items": {"items": STRING}}, [["", 1]], '0.1: 1 is not of type "string"'),
        ({"enum": [*"abcdef", None, 3]}, "x", f'"x" is not one of {EIGHT}'),
        ({"additionalProperties": False}, {"a": 1}, "no properties are allowed"),
        (
            {"properties": {"a": True}, "additionalProperties": False},
            {"a": 1, "b": 1, "c": 1},
            "Additional properties are not allowed ('b', 'c' were unexpected)",
        ),
        (
            {"contains": STRING, "minContains": 2},
            ["a"],
            "too few or too many items fit the schema of 'contains' (minContains)",
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
            {"a": "x"},
            "a: \"x\" is not valid under any of the schemas listed in the 'anyOf' keyword",
        ),
        ({"items": {"oneOf": [POINT, NULL]}}, [{"kind": "point"}], '0: "x" is a required property'),
        ({"anyOf": [POINT, LINE]}, {"kind": "line"}, 'kind: "point" was expected'),
        (STRING, ["x" * 400], '["' + "x" * 295 + "..."),
        (ROWS, {"rows": [*ROOM[:300], {"n": -1}]}, "rows.300.n: -1 is less than the minimum of 0"),
        (ROWS, {"rows": [*ROOM, {"n": -1}]}, NOT_LISTED),
        *((schema, value, NOT_LISTED) for schema, value in MANY),
    ],
)
def test_a_problem_names_its_place_and_its_reason(schema: Any, value: Any, problem: str) -> None:
    assert validator(schema).problem(value) == problem


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"$ref": "#", **STRING}, "x", True),
        ({"$ref": "#", **STRING}, 1, False),
        (ITSELF, "x", True),
        (ITSELF, 1, False),
        (ALWAYS, "x", True),
        (ALWAYS, 1, True),
        (deep(50), nested(50), False),
        (ROWS, {"rows": ROOM}, True),
        ({"uniqueItems": True}, [{"a": at} for at in range(3000)], True),
        ({"type": "integer"}, 1.0, True),
        ({"type": "integer"}, True, False),
        ({"type": "integer"}, 10**400, True),
        ({"maximum": 2**63}, 2**63 + 1, False),
        ({"uniqueItems": True}, [1, True, [1], [True], "1"], True),
        ({"format": "email"}, "x", True),
        ({"contentMediaType": "application/json"}, "{", True),
        ({"dependencies": {"a": ["b"]}}, {"a": 1}, True),  # draft 7 has it, draft 2020-12 does not
    ],
)
def test_the_rules_of_the_draft(schema: Any, value: Any, fits: bool) -> None:
    assert (validator(schema).problem(value) is None) is fits
