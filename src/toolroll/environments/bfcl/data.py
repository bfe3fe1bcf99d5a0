"""BFCL's multi-turn entries and tool documents, read from the `bfcl-eval` wheel without importing
it.

Importing the wheel's utilities would create folders in site-packages, so its JSON Lines files are
read directly. They are parsed once per factory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from toolroll.agents.environments.factory import openai_tool
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Tool

VERSION = "2026.3.23"
# mpmath first: after bfcl-eval, pip lists the dependencies that --no-deps left out
INSTALL = f"pip install mpmath && pip install --no-deps bfcl-eval=={VERSION}"

_TYPES: Mapping[str, str] = {
    **{name: name for name in "integer number string boolean array object".split()},
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
}
"""Maps BFCL's type names to those of JSON Schema. A type that is not listed is a string."""

_PYTHON_NOTE = " Note that the provided function is in Python 3 syntax."
_FLOAT_NOTE = " This is a float type value."

# The name of each class's document file and module, as in the benchmark (bfcl-eval 2026.3.23).
DOCUMENTS: Mapping[str, str] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


def installed() -> bool:
    """Return True if the wheel and the packages that its tool classes import are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("bfcl_eval", "mpmath"))


class BfclData:
    """The entries and ground truths of one category."""

    def __init__(self, category: str) -> None:
        self.category = category

    @property
    def _folder(self) -> Path:
        spec = importlib.util.find_spec("bfcl_eval")
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(f"bfcl-eval is not installed: {INSTALL}")
        return Path(spec.submodule_search_locations[0]) / "data"

    @cached_property
    def entries(self) -> Sequence[Mapping[str, Any]]:
        """The tasks: id, question, initial_config, involved_classes, missed_function."""
        return _lines(self._folder / f"BFCL_v4_{self.category}.json")

    @cached_property
    def ground_truths(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Maps each entry's id to the calls of each user turn, as Python text."""
        path = self._folder / "possible_answer" / f"BFCL_v4_{self.category}.json"
        return {entry["id"]: entry["ground_truth"] for entry in _lines(path)}

    @cached_property
    def documents(self) -> Mapping[str, Sequence[Tool]]:
        """The functions of each class as tools in OpenAI's format."""
        folder = self._folder / "multi_turn_func_doc"
        return {
            name: [to_tool(item) for item in _lines(folder / f"{file}.json")]
            for name, file in DOCUMENTS.items()
        }


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(
            f"{path.name} is not in the installed bfcl-eval: toolroll reads version {VERSION} "
            f"({INSTALL})"
        )
    return [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]


def to_tool(document: Mapping[str, Any]) -> Tool:
    """Return a function document as a tool, converted as BFCL does for OpenAI-style models."""
    parameters = dict(document["parameters"])
    parameters["type"] = "object"
    parameters["properties"] = _properties(parameters["properties"])
    name = document["name"].replace(".", "_")
    return openai_tool(name, document["description"] + _PYTHON_NOTE, parameters)


def _properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _schema(schema) for name, schema in properties.items()}


def _schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one property. For a float, set the format `float` and add a note to the
    description.
    """
    converted = dict(schema)
    if schema.get("type") == "float":
        converted["format"] = "float"
        converted["description"] = schema.get("description", "") + _FLOAT_NOTE
    converted["type"] = _TYPES.get(schema.get("type", "string"), "string")
    if converted["type"] in ("array", "object"):
        if "properties" in schema:
            converted["properties"] = _properties(schema["properties"])
        elif "items" in schema:
            converted["items"] = _items(schema["items"])
    return converted


def _items(items: Mapping[str, Any]) -> dict[str, Any]:
    converted = {**items, "type": _TYPES.get(items["type"], "string")}
    if converted["type"] == "array" and "items" in items:
        converted["items"] = {
            **items["items"],
            "type": _TYPES.get(items["items"]["type"], "string"),
        }
    elif converted["type"] == "object" and "properties" in items:
        converted["properties"] = _properties(items["properties"])
    return converted
