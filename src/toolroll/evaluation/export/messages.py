"""Read recorded messages, which are in OpenAI's format, for formats that have their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from toolroll.rollout.types import Message


class RecordedCall(NamedTuple):
    """A tool call of an assistant message. If the arguments are not a JSON object, `arguments` is
    {}, and `parse_error` has them as they were written.
    """

    id: str
    function: str
    arguments: dict[str, Any]
    parse_error: str | None


def mappings(values: Any) -> list[dict[str, Any]]:
    """Return the dicts in the list `values`. An agent may store anything there."""
    return [item for item in values if isinstance(item, dict)] if isinstance(values, list) else []


def calls_of(message: Message) -> Iterator[RecordedCall]:
    """Yield the tool calls of `message`. A call without an id gets its number as its id."""
    for index, call in enumerate(mappings(message.get("tool_calls"))):
        [function] = mappings([call.get("function")]) or [{}]
        written = function.get("arguments") or {}
        try:
            arguments = orjson.loads(written) if isinstance(written, str) else written
        except ValueError:
            arguments = None
        name, number = str(function.get("name") or "unknown"), str(call.get("id") or index)
        if isinstance(arguments, dict):
            yield RecordedCall(number, name, arguments, None)
        else:
            yield RecordedCall(number, name, {}, f"no JSON object: {written}")


def text_of(content: Any) -> str:
    """Return the text of a message's content. Parts that are not text are left out."""
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) for part in mappings(content) if part.get("type") == "text")
