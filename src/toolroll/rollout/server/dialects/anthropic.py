"""Anthropic's Messages: `POST /v1/messages`.

Invariants: content blocks are converted to chat messages and back. `cache_control`, signatures, the
whitespace in a call's input and Claude Code's attribution line never reach the prompt. So a request
that changes only these still continues an earlier turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolroll.rollout.server.answers.result import CompletionResult
from toolroll.rollout.server.conversation.prefill import split_prefill
from toolroll.rollout.server.conversation.stored_response import ResponseStore
from toolroll.rollout.server.conversation.template_cache import TemplateCache
from toolroll.rollout.server.dialects.anthropic_blocks import (
    PARAGRAPH,
    MessagesRequest,
    read_blocks,
    read_tools,
    response_format,
    tool_choice,
)
from toolroll.rollout.server.dialects.anthropic_writer import (
    MessagesWriter,
    error_body,
    message_body,
)
from toolroll.rollout.server.dialects.blocks import (
    all_switches,
    effort_switches,
    system_places,
    text_parts,
    thinking_switches,
)
from toolroll.rollout.server.dialects.dialect import Dialect, ParsedRequest
from toolroll.rollout.server.dialects.lineage import lineage_of, split_attribution
from toolroll.rollout.server.endpoint_settings import EndpointSettings
from toolroll.rollout.server.errors import ApiError, invalid, refused
from toolroll.rollout.server.requests.protocol import ChatRequest, read


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
        messages = read_blocks(values)
        system = text_parts(request.system or "", "system", ("text",), PARAGRAPH)
        attribution, system = split_attribution(system)
        if system:
            messages.insert(0, {"role": "system", "content": system})
        messages = system_places(messages, anywhere=self.templates.system_anywhere)
        continued = messages[-1]["role"] == "assistant"
        if continued:  # checked here, because only here are the indexes those of the client
            split_prefill(messages, f"messages[{len(values) - 1}]")
        drop = self.settings.server_tools == "drop"
        tools = read_tools(request.tools or (), drop=drop)
        chat = ChatRequest(
            model=request.model,
            max_tokens=request.max_tokens,
            messages=[None],
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or None,
            stop=request.stop_sequences,
            stream=request.stream,
            chat_template_kwargs=self._switches(request),
            continue_final_message=continued or None,
            session_id=request.session_id,
            **tool_choice(request),
            **response_format(request),
        )
        chat.messages = []
        lineage = {**lineage_of(data.get("metadata")), **attribution}
        return ParsedRequest(chat, messages, tools, request, lineage)

    def _switches(self, request: MessagesRequest) -> dict[str, Any]:
        switches: dict[str, Any] = {}
        config, thinking = request.output_config, request.thinking
        if config is not None:
            switches |= effort_switches(
                self.templates, config.effort, "output_config.effort", default="high"
            )
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
        """Return a `message`."""
        return message_body(result)

    def writer(self, parsed: ParsedRequest, result: CompletionResult) -> MessagesWriter:
        """Return the writer of one stream."""
        return MessagesWriter(result)

    def refusal(self, error: ApiError) -> dict[str, Any]:
        """Return Anthropic's error body."""
        return error_body(error)
