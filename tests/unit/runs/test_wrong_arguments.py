"""Arguments made from schemas."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from toolroll.evaluation.wrong_arguments import example_arguments, wrong_calls

SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"a": {"type": "string"}}},
    {
        "type": "object",
        "properties": {
            "a": {"enum": ["up", "down"]},
            "b": {"type": "integer", "minimum": 7},
            "c": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "d": {"$ref": "#/$defs/Point"},
            "e": {"type": "array", "items": {"type": "string"}},
            "f": {"const": 3},
            "g": {"type": ["number", "null"]},
            "h": {"type": "string", "default": "other"},
        },
        "required": ["a", "b", "c", "d", "e", "f", "g", "h"],
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x"],
            }
        },
    },
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_example_fits_its_schema(schema: dict[str, Any]) -> None:
    example = example_arguments(schema)
    assert sorted(example) == schema.get("required", [])
    Draft202012Validator(schema).validate(example)


def test_wrong_calls_are_wrong_in_one_way_each() -> None:
    tool = {"type": "function", "function": {"name": "go", "parameters": SCHEMAS[2]}}
    calls = wrong_calls([tool])
    validator = Draft202012Validator({**SCHEMAS[2], "additionalProperties": False})
    assert (calls[0][0], calls[0][1].name) == ("an unknown tool", "no_such_tool")
    assert [what for what, _ in calls[1:]] == [
        "missing arguments",
        *(f"{name!r} of another type" for name in "abcdefgh"),
        "an unknown argument",
    ]
    assert [what for what, call in calls[1:] if validator.is_valid(call.arguments)] == []
