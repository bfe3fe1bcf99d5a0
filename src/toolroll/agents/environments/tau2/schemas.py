"""Make a tool's schema in OpenAI's format from the signature and docstring of a Python function."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field, create_model

from toolroll.rollout.types import Tool

_SECTION = re.compile(r"^\s*(Args|Returns|Raises):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def tool_schema(name: str, function: Callable[..., Any]) -> Tool:
    """Return `{"type": "function", "function": {name, description, parameters}}`. Nested models
    keep their `$defs`.
    """
    doc = inspect.getdoc(function) or ""
    sections = _SECTION.split(doc)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    described = _parameters(texts.get("Args", ""))
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
    description = " ".join(sections[0].split())
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _parameters(text: str) -> dict[str, str]:
    """Return the parameters' descriptions in the text of an `Args:` section, by name."""
    found: dict[str, list[str]] = {}
    lines = [line for line in inspect.cleandoc(text).splitlines() if line.strip()]
    current = ""
    for line in lines:
        match = _PARAMETER.match(line)
        if match and not line.startswith(" "):
            current = match[1]
            found[current] = [match[2]]
        elif current:
            found[current].append(line.strip())
    return {name: " ".join(words).strip() for name, words in found.items()}
