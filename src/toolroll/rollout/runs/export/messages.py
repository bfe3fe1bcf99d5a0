"""Read recorded messages, which are in OpenAI's format, for formats that have their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from toolroll.rollout.types import Message


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A tool call of an assistant message. `arguments` is None if `text`, the arguments as the
    model wrote them, is not a JSON object.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    text: str


def calls_of(message: Message) -> list[RecordedCall]:
    """Return the tool calls of `message`. A call without an id gets its number as its id."""
    calls = message.get("tool_calls")
    return [
        _call(call, index)
        for index, call in enumerate(calls if isinstance(calls, list) else ())
        if isinstance(call, dict)
    ]


def _call(call: dict[str, Any], index: int) -> RecordedCall:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    written = function.get("arguments")
    text = written if isinstance(written, str) else orjson.dumps(written or {}).decode()
    try:
        arguments = orjson.loads(text)
    except ValueError:
        arguments = None
    return RecordedCall(
        str(call.get("id") or index),
        str(function.get("name") or "unknown"),
        arguments if isinstance(arguments, dict) else None,
        text,
    )


def text_of(content: Any) -> str:
    """Return the text of a message's content. Parts that are not text are left out."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return "".join(str(part["text"]) for part in parts if part.get("type") == "text")
    return content if isinstance(content, str) else ""
