"""`plain_fits`: its yes is the validator's yes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from toolroll.parsers.reading.plain_schema import plain_fits
from toolroll.parsers.reading.schema import Offered, check_call
from toolroll.parsers.types import CallStatus, ToolCall

NAMES = st.sampled_from(["a", "b", "c"])
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.one_of(
        st.fixed_dictionaries({}, optional={"type": KINDS, "description": st.just("x")}),
        st.fixed_dictionaries(
            {
                "enum": st.lists(
                    st.one_of(NAMES, st.integers(0, 2), st.booleans()), min_size=1, max_size=3
                )
            }
        ),
        st.fixed_dictionaries({"type": st.lists(KINDS, min_size=1, max_size=2, unique=True)}),
        st.fixed_dictionaries({"minimum": st.integers(0, 2)}),
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array"]),
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "items": inner,
            "additionalProperties": st.booleans(),
        },
    ),
    max_leaves=6,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 2), st.floats(0, 2), NAMES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)


@given(schema=SCHEMAS, value=VALUES)
def test_a_yes_is_the_validators(schema: dict[str, Any], value: Any) -> None:
    fits = plain_fits(schema)
    if fits is not None and fits(value):
        assert Draft202012Validator(schema).is_valid(value)


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
    ],
)
def test_the_schemas_of_tools_are_plain(arguments: dict[str, Any], valid: bool) -> None:
    fits = plain_fits(PARAMETERS)
    assert fits is not None and fits(arguments) is valid
    tools = [{"type": "function", "function": {"name": "book", "parameters": PARAMETERS}}]
    status = check_call(ToolCall("book", arguments, ""), Offered(tools)).status
    assert status is (CallStatus.OK if valid else CallStatus.BAD_ARGUMENTS)


def test_an_integral_float_is_left_to_the_validator() -> None:
    """JSON schema takes 2.0 for an integer."""
    fits = plain_fits({"type": "integer"})
    assert fits is not None and not fits(2.0)
    tools = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
            },
        }
    ]
    assert check_call(ToolCall("f", {"n": 2.0}, ""), Offered(tools)).ok


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"$ref": "#/x"},
        {"type": "dict"},
        {"anyOf": []},
        {"enum": [1]},
        {"pattern": "x"},
        {"items": True},
    ],
)
def test_what_is_not_plain_is_no_yes(schema: Any) -> None:
    assert plain_fits(schema) is None
