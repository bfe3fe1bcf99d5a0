"""Convert the tools of a request to chat tools: the steps that Messages and Responses share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from toolroll.rollout.server.dialects.blocks import only
from toolroll.rollout.server.errors import refused
from toolroll.rollout.types import Tool


def is_function(
    tool: Mapping[str, Any],
    kinds: Collection[str | None],
    known: Collection[str],
    place: str,
    *,
    drop: bool,
) -> bool:
    """Return True if `tool` is a function of the client: its type is in `kinds`. Any other tool
    runs on the provider's servers. Return False for a server tool if `drop` is True.

    Raise `ApiError` for a server tool if `drop` is False, and for a function that has a field that
    is not in `known`.
    """
    kind = tool.get("type")
    if kind not in kinds:
        if drop:
            return False
        words = f"{place} is {kind!r}: this endpoint has function tools only"
        raise refused(f"{place}.type", f"{words}. Leave it out, or serve with --server-tools drop")
    callers = tool.get("allowed_callers")
    only({**tool, "allowed_callers": None if callers == ["direct"] else callers}, known, place)
    return True


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any], place: str, *, strict: bool
) -> Tool:
    """Return a function as a chat tool. Raise `ApiError` if the length of `name` is not valid."""
    if not 0 < len(name) <= 256:
        words = f"{place}.name must have 1 to 256 characters"
        raise refused(f"{place}.name", words, code="invalid_value")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = dict(parameters)
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}
