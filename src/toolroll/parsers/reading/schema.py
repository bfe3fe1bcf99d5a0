"""Check a call against the tools that were offered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import orjson

from toolroll.parsers.reading.bounded_validator import BoundedValidator, NotChecked
from toolroll.parsers.types import CallStatus, ToolCall


class Offered:
    """The tools that were offered (in OpenAI's format), by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.functions: dict[str, Mapping[str, Any]] = {
            tool["function"]["name"]: tool["function"] for tool in tools
        }

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schemas of the parameters of the tool `name`, by parameter name. Return
        an empty mapping if they are unknown.
        """
        schema = self.functions.get(name, {}).get("parameters")
        found = schema.get("properties") if isinstance(schema, Mapping) else None
        return found if isinstance(found, Mapping) else {}


def check_call(call: ToolCall, offered: Offered) -> ToolCall:
    """Check `call` against the tools. If it is ok but does not fit them, return a copy with the
    status unknown_tool or bad_arguments. Otherwise return `call`.
    """
    if not call.ok:
        return call
    function = offered.functions.get(call.name)
    if function is None:
        known = ", ".join(sorted(offered.functions)) or "none"
        return replace(
            call,
            status=CallStatus.UNKNOWN_TOOL,
            error=f"there is no tool named {call.name!r}; the tools are: {known}",
        )
    validator = _validator_of(function.get("parameters"))
    problem = None if validator is None else _first_problem(validator, call.arguments)
    if problem is None:
        return call
    return replace(
        call,
        status=CallStatus.BAD_ARGUMENTS,
        error=f"the arguments of {call.name} do not fit: {problem}",
    )


def _validator_of(schema: Any) -> BoundedValidator | None:
    """Return the validator of `schema`, or None if arguments cannot be checked."""
    if not isinstance(schema, Mapping):
        return None
    try:
        return _compiled(orjson.dumps(schema))
    except orjson.JSONEncodeError:
        return None  # nested too deep, or not JSON


@lru_cache(maxsize=4096)
def _compiled(schema: bytes) -> BoundedValidator | None:
    try:
        return BoundedValidator(orjson.loads(schema))
    except NotChecked:
        return None


def _first_problem(validator: BoundedValidator, arguments: Any) -> str | None:
    try:
        error = validator.first_problem(arguments)
    except NotChecked:
        return None
    if error is None:
        return None
    path = ".".join(str(part) for part in error.absolute_path)
    words = error.message if len(error.message) <= 300 else error.message[:297] + "..."
    return f"{path}: {words}" if path else words
