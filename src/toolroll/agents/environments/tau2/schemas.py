"""Make a tool's schema in OpenAI's format from the signature and docstring of a Python function."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field, create_model

from toolroll.agents.environments.factory import openai_tool
from toolroll.rollout.runtime.signature import read_docstring
from toolroll.rollout.types import Tool

# Other headings, such as `Checks:`, are part of the description.
_SECTION = re.compile(r"^\s*(?:Args|Returns|Raises):\s*$", re.MULTILINE)


def tool_schema(name: str, function: Callable[..., Any]) -> Tool:
    """Return `{"type": "function", "function": {name, description, parameters}}`. Nested models
    keep their `$defs`.
    """
    description = _SECTION.split(inspect.getdoc(function) or "", maxsplit=1)[0]
    _, described = read_docstring(function)
    hints = typing.get_type_hints(function)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (
            hints.get(parameter.name, Any),
            Field(default=default, description=described.get(parameter.name)),
        )
    model: type[BaseModel] = create_model(name, **fields)
    parameters = model.model_json_schema()
    parameters.pop("title", None)
    for value in parameters.get("properties", {}).values():
        value.pop("title", None)
    return openai_tool(name, " ".join(description.split()), parameters)
