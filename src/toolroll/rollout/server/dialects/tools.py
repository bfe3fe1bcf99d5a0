"""Convert the tools of a request to chat tools: the steps that Messages and Responses share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from toolroll.rollout.server.dialects.blocks import only, text
from toolroll.rollout.server.errors import invalid, refused
from toolroll.rollout.types import Tool


def is_function(
    tool: Mapping[str, Any],
    kinds: Collection[str | None],
    known: Collection[str],
    place: str,
    *,
    drop: bool,
) -> bool:
    """Return True if `tool` is a function that the client runs: its type is in `kinds`. Any other
    tool runs on the provider's servers. For such a tool, return False if `drop` is True, and raise
    `ApiError` if not.

    Raise `ApiError` for a function that has a field that is not in `known`.
    """
    kind = tool.get("type")
    if kind not in kinds:
        if drop:
            return False
        words = f"{place} is {kind!r}: this endpoint has only tools that the client runs"
        raise refused(f"{place}.type", f"{words}. Leave it out, or serve with --server-tools drop")
    callers = tool.get("allowed_callers")
    only({**tool, "allowed_callers": None if callers == ["direct"] else callers}, known, place)
    return True


def function_tool(tool: Mapping[str, Any], place: str, parameters: Mapping[str, Any]) -> Tool:
    """Return the function `tool`, with the schema `parameters`, as a chat tool. Raise `ApiError` if
    its name, description or `strict` is not valid.
    """
    name, strict = text(tool, "name", place), tool.get("strict")
    if not 0 < len(name) <= 256:
        words = f"{place}.name must have 1 to 256 characters"
        raise invalid(f"{place}.name", words)
    if not isinstance(strict, bool | None):
        words = f"{place}.strict must be true or false"
        raise invalid(f"{place}.strict", words)
    function: dict[str, Any] = {"name": name}
    if tool.get("description") is not None:
        function["description"] = text(tool, "description", place)
    function["parameters"] = dict(parameters)
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}
