"""Anthropic's Messages: `POST /v1/messages`.

Invariants: content blocks are converted to chat messages and back. `cache_control`, signatures, the
whitespace in a call's input and Claude Code's attribution line never reach the prompt. So a request
that changes only these still continues an earlier turn. `message_start` has the number of tokens in
the prompt. The events of a stream add up to the blocks that the same request gets without `stream`.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from toolroll.endpoint.answers.result import Choice, CompletionResult
from toolroll.endpoint.conversation.prefill import split_prefill
from toolroll.endpoint.conversation.stored_response import ResponseStore
from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.dialects.anthropic_blocks import (
    PARAGRAPH,
    MessagesRequest,
    read_blocks,
    read_tools,
    response_format,
    tool_choice,
)
from toolroll.endpoint.dialects.blocks import (
    all_switches,
    chat_request,
    input_json,
    input_of,
    lineage_of,
    renamed,
    split_attribution,
    system_places,
    text_parts,
    thinking_switches,
)
from toolroll.endpoint.dialects.dialect import Dialect, Event, ParsedRequest
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.errors import ApiError, invalid, refused
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.endpoint.requests.request_bodies import read
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.parsers.openai import openai_function
from toolroll.parsers.types import Delta, ToolCall


@dataclass(frozen=True, eq=False)
class AnthropicMessages(Dialect):
    """`POST /v1/messages`. `reasons` is True if the served model's parser supports reasoning."""

    kind = "message"
    prefix = "msg_"

    templates: TemplateCache
    settings: EndpointSettings
    reasons: bool

    # --- requests ---------------------------------------------------------------------------------

    def translate(self, data: dict[str, Any], responses: ResponseStore) -> ParsedRequest:
        """Return the request in `data`. Raise `ApiError` if it is not valid."""
        request = read(MessagesRequest, data)
        if request.max_tokens is None:
            raise invalid("max_tokens", "max_tokens is missing")
        values, request.messages = request.messages, []
        ignored = IgnoredFields()
        messages = read_blocks(values, ignored, images=self.templates.images)
        system = text_parts(request.system or "", "system", ("text",), PARAGRAPH, ignored)
        attribution, system = split_attribution(system)
        if system:
            messages.insert(0, {"role": "system", "content": system})
        messages = system_places(messages, anywhere=self.templates.system_anywhere)
        continued = messages[-1]["role"] == "assistant"
        if continued:  # checked here, because only here are the indexes those of the client
            split_prefill(messages, f"messages[{len(values) - 1}]")
        drop = self.settings.server_tools == "drop"
        tools = read_tools(request.tools or (), drop=drop)
        chat = chat_request(
            request,
            max_tokens=request.max_tokens,
            top_k=request.top_k or None,
            stop=request.stop_sequences,
            chat_template_kwargs=self._switches(request, ignored),
            continue_final_message=continued or None,
            **tool_choice(request),
            **response_format(request),
        )
        lineage = {**lineage_of(data.get("metadata")), **attribution}
        return ParsedRequest(chat, messages, ToolList.of(tools), request, lineage, ignored)

    def _switches(self, request: MessagesRequest, ignored: IgnoredFields) -> dict[str, Any]:
        switches: dict[str, Any] = {}
        config, thinking = request.output_config, request.thinking
        if config is not None:
            place = "output_config.effort"
            switches |= self.templates.effort_switches(config.effort, place, ignored)
        if thinking is None or thinking.type == "adaptive":
            return all_switches(request.chat_template_kwargs, switches)
        switches |= thinking_switches(self.templates, thinking.type, reasons=self.reasons)
        if thinking.budget_tokens is not None:
            if "thinking_budget" not in self.templates.variables:
                problem = "the chat template has no switch thinking_budget"
                raise refused(
                    "thinking.budget_tokens",
                    f"thinking.budget_tokens cannot be honored: {problem}. Leave it out, or send "
                    '{"type": "adaptive"}',
                )
            switches["thinking_budget"] = thinking.budget_tokens
        return all_switches(request.chat_template_kwargs, switches)

    # --- answers ----------------------------------------------------------------------------------

    def body(self, parsed: ParsedRequest, result: CompletionResult) -> dict[str, Any]:
        [choice] = result.choices
        content: list[dict[str, Any]] = []
        for step in choice.pieces:
            if step.call is not None:
                function = openai_function(step.call)
                tool_input = input_of(function["arguments"])
                content.append(_tool_use(step.call.id, function["name"], tool_input))
            elif step.kind == "reasoning":
                block = {
                    "type": "thinking",
                    "thinking": step.text,
                    "signature": signature(step.text),
                }
                content.append(block)
            else:
                content.append({"type": "text", "text": step.text})
        return {
            "id": result.id,
            "type": "message",
            "role": "assistant",
            "model": result.model,
            "content": content,
            **stop_of(result.stop_strings, choice),
            "usage": usage_of(result),
        }

    def writer(self, parsed: ParsedRequest, result: CompletionResult) -> MessagesWriter:
        return MessagesWriter(result)

    def refusal(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)


# --- answers and errors ---------------------------------------------------------------------------


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELD_NAMES = {
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
}
"""Maps the core's field names to Anthropic's, if they differ."""

_DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}


def signature(thought: str) -> str:
    """Return a hash of the reasoning `thought`. It is the `signature` of a thinking block, or the
    `encrypted_content` of a reasoning item. The endpoint does not check the value that a client
    sends back.
    """
    digest = blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=24).digest()
    return base64.b64encode(digest).decode()


def stop_of(stop_sequences: Sequence[str], choice: Choice) -> dict[str, Any]:
    """Return `stop_reason` and `stop_sequence`. `stop_sequences` are those of the request,
    or the defaults of its session or of the server.
    """
    completion, turn = choice.completion, choice.turn
    matched = completion.matched
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(matched, str) and matched in stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    called = turn is not None and turn.parsed.tool_calls
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def usage_of(result: CompletionResult) -> dict[str, Any]:
    """Return Anthropic's usage. Its `input_tokens` does not count prompt tokens that the engine
    found in its cache.
    """
    sampled = sum(len(choice.completion.output_ids) for choice in result.choices)
    cached = max((choice.completion.cached_tokens for choice in result.choices), default=0)
    cached = min(cached, len(result.prompt_ids))
    return _usage(len(result.prompt_ids) - cached, sampled, cached)


def _usage(uncached: int, sampled: int, cached: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": uncached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _tool_use(call_id: str, name: str, tool_input: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": tool_input}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error body. It also has the endpoint's stable `code`, and `param`, which
    names the field at fault or is None.
    """
    error = renamed(error, _FIELD_NAMES)
    default = "invalid_request_error" if error.status < 500 else "api_error"
    return {
        "type": "error",
        "error": {
            "type": _ERROR_TYPES.get(error.status, default),
            "message": str(error),
            "code": error.code,
            "param": error.param,
        },
    }


class MessagesWriter:
    """Writes one message as events. The input of a tool call is a single delta. It is written when
    the parser is certain of the call.
    """

    def __init__(self, result: CompletionResult) -> None:
        self._result = result
        self._index = -1
        self._open: str | None = None
        self._thought: list[str] = []

    def start(self) -> Iterable[Event]:
        """Return `message_start`, with the number of prompt tokens, and `ping`."""
        message: dict[str, Any] = {
            "id": self._result.id,
            "type": "message",
            "role": "assistant",
            "model": self._result.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(self._result.prompt_ids), 0),
        }
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def add(self, index: int, step: Delta) -> Iterable[Event]:
        """Return the events for one delta. If its kind is different from the open block's kind, a
        new block is opened.
        """
        if step.call is not None:
            yield from self._call(step.call)
            return
        kind = "thinking" if step.kind == "reasoning" else "text"
        if self._open != kind:
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            yield from self._start_block(kind, {"type": kind, **empty})
        if kind == "thinking":
            self._thought.append(step.text)
        yield self._delta({"type": _DELTAS[kind], kind: step.text})

    async def finish(self) -> AsyncIterator[Event]:
        """Yield the events that end the last block and the message."""
        for event in self._close():
            yield event
        result = self._result
        stop = stop_of(result.stop_strings, result.choices[0])
        yield {"type": "message_delta", "delta": stop, "usage": usage_of(result)}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Event:
        """Return an `error` event."""
        return error_body(error)

    def _call(self, call: ToolCall) -> Iterable[Event]:
        function = openai_function(call)
        yield from self._start_block("tool_use", _tool_use(call.id, function["name"], {}))
        tool_input = input_json(function["arguments"])
        yield self._delta({"type": "input_json_delta", "partial_json": tool_input})
        yield from self._close()

    def _start_block(self, kind: str, block: dict[str, Any]) -> Iterable[Event]:
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterable[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            signed = signature("".join(self._thought))
            self._thought = []
            yield self._delta({"type": "signature_delta", "signature": signed})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
