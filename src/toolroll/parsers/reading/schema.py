"""The tools that were offered: the schemas of their parameters, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from toolroll.parsers.reading.resolve import Schema
from toolroll.parsers.reading.validator import NotChecked, Validator
from toolroll.parsers.types import CallStatus, ToolCall


class ToolSchema(NamedTuple):
    """The JSON schema of a tool's parameters. Without `validator`, arguments cannot be checked."""

    schema: Schema
    validator: Validator | None


class Offered:
    """The tools that were offered (in OpenAI's format), by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.functions: dict[str, Mapping[str, Any]] = {
            tool["function"]["name"]: tool["function"] for tool in tools
        }
        self._schemas: dict[str, ToolSchema | None] = {}

    def parameters(self, name: str) -> ToolSchema | None:
        """Return the schema of the parameters of the tool `name`, or None if it is unknown."""
        if name not in self._schemas and name in self.functions:
            self._schemas[name] = _tool_schema(self.functions[name].get("parameters"))
        return self._schemas.get(name)


def parameter(offered: Offered | None, name: str, key: str) -> Schema | None:
    """Return the schema of the parameter `key` of the tool `name`, or None if it is unknown."""
    parameters = offered.parameters(name) if offered is not None else None
    return parameters.schema.member(key) if parameters is not None else None


def check_call(call: ToolCall, offered: Offered) -> ToolCall:
    """Check `call` against the tools. If it is ok but does not fit them, return a copy with the
    status unknown_tool or bad_arguments. Otherwise return `call`.
    """
    if not call.ok:
        return call
    if call.name not in offered.functions:
        names = ", ".join(sorted(offered.functions)) or "none"
        error = f"there is no tool named {call.name!r}; the tools are: {names}"
        return call.failed(CallStatus.UNKNOWN_TOOL, error)
    parameters = offered.parameters(call.name)
    validator = parameters.validator if parameters is not None else None
    problem = None if validator is None else _first_problem(validator, call.arguments)
    if problem is None:
        return call
    error = f"the arguments of {call.name} do not fit: {problem}"
    return call.failed(CallStatus.BAD_ARGUMENTS, error)


def _tool_schema(document: Any) -> ToolSchema | None:
    """Return the schema `document`, or None if it is not a mapping."""
    if not isinstance(document, Mapping):
        return None
    try:
        return _compiled(orjson.dumps(document))
    except orjson.JSONEncodeError:  # nested too deep, or not JSON
        return ToolSchema(Schema(document), None)


@lru_cache(maxsize=4096)
def _compiled(schema: bytes) -> ToolSchema:
    """Return the schema with this JSON text. The key is the whole text, so a schema that was
    changed in place is read again.
    """
    document = orjson.loads(schema)
    try:
        valid = Schema.of(document, valid=True)
        return ToolSchema(valid, Validator(valid))
    except NotChecked:
        return ToolSchema(Schema.of(document, valid=False), None)


def _first_problem(validator: Validator, arguments: Any) -> str | None:
    try:
        return validator.problem(arguments)
    except NotChecked:
        return None
