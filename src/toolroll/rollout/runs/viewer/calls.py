"""Find the calls of an episode that were not executed because they were invalid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from toolroll.parsers.reading.schema import Offered, ToolSchemas
from toolroll.parsers.types import CallStatus, ToolCall
from toolroll.rollout.types import InteractionResult

_UNREADABLE = (CallStatus.INVALID_JSON, CallStatus.UNCLOSED, CallStatus.MISSING_NAME)


class CallChecker:
    """Check recorded calls against the tools of their episode.

    The record counts invalid calls by status, but does not say which calls they were. A call is
    reported only if its status is one that the episode counted.
    """

    def __init__(self) -> None:
        self._schemas = ToolSchemas()

    def invalid(self, result: InteractionResult) -> list[tuple[int, int, str]]:
        """Return `(message, call, status)` for each invalid call; both indexes count from 0."""
        counted = {
            status for status in CallStatus if result.metrics.get(f"invalid_calls/{status}", 0) > 0
        }
        if not counted:
            return []
        offered = Offered([tool for tool in result.tools if tool.get("function", {}).get("name")])
        return [
            (message, call, status.value)
            for message, call, function in _functions(result.messages)
            if (status := self._status(function, offered, counted)) in counted
        ]

    def _status(
        self, function: Mapping[str, Any], offered: Offered, counted: set[CallStatus]
    ) -> CallStatus:
        arguments = _object(function.get("arguments"))
        if arguments is None:
            return next((one for one in _UNREADABLE if one in counted), CallStatus.OK)
        call = ToolCall(str(function.get("name") or ""), arguments, "")
        return self._schemas.check(call, offered).status


def called_tools(messages: list[dict[str, Any]]) -> list[str]:
    """Return the names of the tools that were called, sorted."""
    return sorted(
        {str(function.get("name") or "unknown") for _, _, function in _functions(messages)}
    )


def _functions(messages: list[dict[str, Any]]) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    for number, message in enumerate(messages):
        for place, call in enumerate(message.get("tool_calls") or ()):
            yield number, place, call.get("function") or {}


def _object(arguments: Any) -> dict[str, Any] | None:
    """Return the arguments as an object; None if they are not the JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return arguments if isinstance(arguments, dict) else None
