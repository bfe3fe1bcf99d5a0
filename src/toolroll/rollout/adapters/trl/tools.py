"""`tool_method`: makes a Python method from a tool's schema. TRL converts the method back to a
schema (with transformers' `get_json_schema`).

A Python signature cannot express limits, patterns or the types inside nested objects, so these are
lost. Names, descriptions, required parameters, simple types and choices are kept.
"""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Tool

_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict[str, Any],
    "array": list[Any],
}
_LISTS: Mapping[Any, Any] = {
    "string": list[str],
    "integer": list[int],
    "number": list[float],
    "boolean": list[bool],
}
"""The Python types of arrays, by the JSON type of their items."""
_MISSING: Any = None
"""The default of a parameter that is not required. This value is not passed to the tool."""


def tool_method(tool: Tool) -> Callable[..., str]:
    """Return a method that passes its arguments to `self._call(name, arguments)`. Raise
    `UsageError` if a name in the schema is not a Python name.
    """
    function = tool["function"]
    name = str(function["name"])
    schema = function.get("parameters") or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    for one in (name, *properties):
        if not one.isidentifier() or keyword.iskeyword(one) or one == "self":
            raise UsageError(f"the tool {name!r}: TRL needs Python names, and {one!r} is not one")

    def method(self: Any, **arguments: Any) -> str:
        text: str = self._call(
            name,
            {
                key: value
                for key, value in arguments.items()
                if value is not _MISSING or key in required
            },
        )
        return text

    order = sorted(properties, key=lambda one: one not in required)  # required parameters first
    hints = {
        one: _hint(properties[one]) if one in required else _hint(properties[one]) | None
        for one in order
    }
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    method.__name__ = method.__qualname__ = name
    method.__annotations__ = {**hints, "return": str}
    vars(method)["__signature__"] = inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(
                    one,
                    keyword_only,
                    default=inspect.Parameter.empty if one in required else _MISSING,
                    annotation=hints[one],
                )
                for one in order
            ),
        ],
        return_annotation=str,
    )
    method.__doc__ = _docstring(function, properties, order)
    return method


def _hint(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    if kind == "array":
        return _LISTS.get((schema.get("items") or {}).get("type"), list[Any])
    return _TYPES.get(kind, str) if isinstance(kind, str) else str


def _docstring(function: Mapping[str, Any], properties: Mapping[str, Any], order: list[str]) -> str:
    text = _line(function.get("description")) or str(function["name"])
    if not order:
        return text
    lines = [f"    {one}: {_described(one, properties[one])}" for one in order]
    return "\n".join([text, "", "Args:", *lines])


def _described(name: str, schema: Mapping[str, Any]) -> str:
    text = _line(schema.get("description")) or name.replace("_", " ")
    if schema.get("enum"):
        text += f" (choices: {json.dumps(schema['enum'])})"
    return text


def _line(text: Any) -> str:
    return re.sub(r"\s+", " ", str(text or "")).strip()
