"""Make arguments for a tool from its schema, both valid and invalid ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.parsers.types import ToolCall
from toolroll.rollout.types import Tool

_EXAMPLES: Mapping[str, Any] = {
    "string": "x",
    "integer": 1,
    "number": 1.5,
    "boolean": False,
    "array": [],
    "object": {},
    "null": None,
}


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value of the right type for each required argument in `schema`."""
    example = _example({**schema, "type": "object"}, schema)
    return dict(example) if isinstance(example, Mapping) else {}


def wrong_calls(tools: Sequence[Tool]) -> list[tuple[str, ToolCall]]:
    """Return calls that a model may write by mistake, each with a description of the mistake.

    One call has the name of an unknown tool. For each tool, there is a call without arguments if
    some are required, a call with a wrong type for each argument, and a call with an unknown
    argument.
    """
    calls = [("an unknown tool", ToolCall("no_such_tool", {}, ""))]
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        fitting = example_arguments(schema)
        properties = schema.get("properties", {})
        if schema.get("required"):
            calls.append(("missing arguments", ToolCall(name, {}, "")))
        for argument in properties:
            kind = _resolved(properties[argument], schema).get("type")
            wrong = {argument: 7 if kind == "string" else "seven"}
            calls.append((f"{argument!r} of another type", ToolCall(name, fitting | wrong, "")))
        calls.append(("an unknown argument", ToolCall(name, fitting | {"no_such_argument": 1}, "")))
    return calls


def _example(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    schema = _resolved(schema, root)
    for word in ("const", "default"):
        if word in schema:
            return schema[word]
    if schema.get("enum"):
        return schema["enum"][0]
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return _example(schema[word][0], root)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties", {})
        required = [name for name in schema.get("required", ()) if name in properties]
        return {name: _example(properties[name], root) for name in required}
    if kind == "integer":
        return int(schema.get("minimum", 1))
    return _EXAMPLES.get(kind, "x") if isinstance(kind, str) else "x"


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `schema`. If it is a reference into `$defs`, return the schema that it refers to."""
    if not isinstance(schema, Mapping):
        return {}
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    target = root.get("$defs", {}).get(name, schema)
    return target if isinstance(target, Mapping) else {}
