"""Convert replies to OpenAI messages and back, and to `{normal_text, calls}`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolroll.parsers.base import OfferedTool, ToolCallParser
from toolroll.parsers.reading.json_text import made_call
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import ParsedReply, ToolCall


class OpenAICompatibleToolCallAdapter:
    """Parses replies for `tools_info` (tools in OpenAI's format) with the parser `parser_type`, a
    name or a parser.
    """

    def __init__(
        self, tools_info: Sequence[OfferedTool], parser_type: str | ToolCallParser = "qwen25"
    ) -> None:
        self.tools_info = list(tools_info)
        parser = get_parser(parser_type) if isinstance(parser_type, str) else parser_type
        self.parser_type = parser_type if isinstance(parser_type, str) else parser.name
        self._parser = parser

    def parse_response_to_openai_format(self, response: str) -> dict[str, Any]:
        """Return `{openai_message, parsed_result: {normal_text, calls: [{name, parameters}]},
        success, error}`.

        If the reply contains a call that cannot be executed, `success` is False and `error` is the
        reason. `openai_message` contains all calls, so that no text is lost.
        """
        return openai_result(self._parser.parse(response, tools=self.tools_info))

    def get_openai_tools_format(self) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's format."""
        return [
            {"type": "function", "function": dict(tool["function"])} for tool in self.tools_info
        ]


def openai_result(reply: ParsedReply) -> dict[str, Any]:
    """Return `reply` in the form of `parse_response_to_openai_format`."""
    problem = "; ".join(call.error or str(call.status) for call in reply.bad_calls)
    return {
        "openai_message": to_openai(reply),
        "parsed_result": {
            "normal_text": reply.content,
            "calls": [
                {"name": call.name, "parameters": json.dumps(call.arguments, ensure_ascii=False)}
                for call in reply.ok_calls
            ],
        },
        "success": not problem,
        "error": problem or None,
    }


def create_openai_adapter(
    tools_info: Sequence[OfferedTool], parser_type: str = "qwen25"
) -> OpenAICompatibleToolCallAdapter:
    """Return an adapter for `tools_info`."""
    return OpenAICompatibleToolCallAdapter(tools_info, parser_type)


def parse_tools(
    response: str, tools: Sequence[OfferedTool], parser: str = "qwen25"
) -> dict[str, Any]:
    """Parse `response` and return `{normal_text, calls}`. Each call's parameters are JSON text."""
    result: dict[str, Any] = create_openai_adapter(tools, parser).parse_response_to_openai_format(
        response
    )["parsed_result"]
    return result


def from_openai(message: Mapping[str, Any]) -> ParsedReply:
    """Convert `message`, an assistant message in OpenAI's format, to a reply.

    This is the inverse of `to_openai`, except for spans and raw text. Arguments may be JSON text or
    an object. Raises `ValueError` if the message has a different role, or if its content is in
    parts.
    """
    if message.get("role", "assistant") != "assistant":
        raise ValueError(
            f"expected an assistant message, not a message of role {message.get('role')!r}"
        )
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ValueError(
            "the content of an assistant message must be text or None, not a list of parts"
        )
    calls = []
    for entry in message.get("tool_calls") or ():
        function = entry["function"]
        arguments = function.get("arguments")
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parsed = made_call(
            function.get("name") or "", {} if arguments in (None, "") else arguments, raw, (0, 0)
        )
        calls.append(replace(parsed, id=entry.get("id") or "", span=None))
    return ParsedReply(content or "", message.get("reasoning_content") or None, tuple(calls))


def to_openai(reply: ParsedReply) -> dict[str, Any]:
    """Return `reply` as an assistant message in OpenAI's format. It contains every call, even an
    unreadable one.
    """
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.content or (None if reply.tool_calls else ""),
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": openai_function(call)}
            for call in reply.tool_calls
        ]
    return message


def openai_function(call: ToolCall) -> dict[str, str]:
    """Return a call's `function` in OpenAI's format. Unreadable arguments stay as written."""
    arguments = call.raw
    if call.arguments is not None:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"name": call.name or "unknown", "arguments": arguments}
