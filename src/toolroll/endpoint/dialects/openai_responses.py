"""OpenAI's Responses: `POST /v1/responses`.

Invariants: items are converted to chat messages and back. The ids and statuses of items never reach
the prompt, so a request that changes only these still continues an earlier turn.
`previous_response_id` continues the turn of the response with this id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field

from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.conversation.messages import with_role
from toolroll.endpoint.conversation.stored_response import ResponseStore, StoredResponse
from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.dialects.blocks import (
    all_switches,
    chat_request,
    lineage_of,
    mapping,
    renamed,
    system_places,
)
from toolroll.endpoint.dialects.dialect import Dialect, ParsedRequest
from toolroll.endpoint.dialects.openai_responses_items import (
    Names,
    flat_name,
    read_items,
    read_tools,
)
from toolroll.endpoint.dialects.openai_responses_writer import (
    ResponsesWriter,
    output_of,
    state_of,
    usage_of,
)
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.errors import ApiError, invalid
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.endpoint.requests.request_bodies import (
    Body,
    Common,
    NamedChoice,
    NamedFunction,
    StreamOptions,
    read,
)
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Message

_PARAMETER_NAMES = {
    "messages": "input",
    "response_format": "text.format",
}
"""Maps the core's field names to the names in Responses, if they differ."""


@dataclass(frozen=True, slots=True)
class RequestDetails:
    """The parts of the request that are needed for the answer, or that the answer repeats."""

    request: ResponsesRequest
    names: Names
    metadata: Mapping[str, Any]

    @property
    def encrypted(self) -> bool:
        """True if reasoning items have an `encrypted_content`. With `store: false`, Qwen Code does
        not ask for it, but sends reasoning back as text without it.
        """
        return bool(self.request.include) or not self.request.store


@dataclass(frozen=True, eq=False)
class OpenAIResponses(Dialect):
    """`POST /v1/responses`. `reasons` is True if the served model's parser supports reasoning."""

    kind = "response"
    prefix = "resp_"
    writer_type: ClassVar[type[ResponsesWriter]] = ResponsesWriter

    encoder: Encoder
    templates: TemplateCache
    settings: EndpointSettings
    reasons: bool

    # --- requests ---------------------------------------------------------------------------------

    def translate(self, data: dict[str, Any], responses: ResponseStore) -> ParsedRequest:
        """Return the request in `data`. Raise `ApiError` if it is not valid."""
        request = read(ResponsesRequest, data)
        ignored = IgnoredFields()
        messages = self._messages(request, responses, ignored)
        request.input = ""
        drop = self.settings.server_tools == "drop"
        tools, names = read_tools(request.tools or (), drop=drop)
        choice: Any = request.tool_choice
        if isinstance(choice, FunctionChoice):
            name = flat_name(choice.namespace, choice.name) if choice.namespace else choice.name
            choice = NamedChoice(function=NamedFunction(name=name))
        chat = chat_request(
            request,
            max_tokens=request.max_output_tokens,
            tool_choice=choice,
            parallel_tool_calls=request.parallel_tool_calls,
            chat_template_kwargs=self._switches(request, ignored),
            **_format(request),
        )
        metadata = mapping(data.get("metadata") or {}, "metadata")
        details = RequestDetails(request, names, metadata)
        lineage = lineage_of(request.client_metadata)
        return ParsedRequest(chat, messages, ToolList.of(tools), details, lineage, ignored)

    def _messages(
        self, request: ResponsesRequest, responses: ResponseStore, ignored: IgnoredFields
    ) -> list[Message]:
        instructions = request.instructions or ""
        new = read_items(
            request.input,
            ignored,
            reasons=self.reasons,
            find=responses.item,
            images=self.templates.images,
        )
        messages: list[Message] = (
            [{"role": "system", "content": instructions}] if instructions else []
        )
        if request.previous_response_id is not None:
            stored = responses.get(request.previous_response_id)
            if stored is None:
                raise not_found(request.previous_response_id, "previous_response_id")
            messages = stored.messages(instructions)
        messages += new
        if not self.templates.developer:
            messages = with_role(messages, "developer", "system")
        if not new or new[-1]["role"] == "assistant":
            problem = "input must end with a message or a call's output, not with the model's reply"
            raise invalid("input", problem)
        return system_places(messages, anywhere=self.templates.system_anywhere)

    def _switches(self, request: ResponsesRequest, ignored: IgnoredFields) -> dict[str, Any]:
        switches: dict[str, Any] = {}
        if request.reasoning is not None:
            effort = request.reasoning.effort
            switches |= self.templates.effort_switches(effort, "reasoning.effort", ignored)
        verbosity = request.text.verbosity if request.text is not None else None
        if verbosity is not None and "verbosity" in self.templates.variables:
            switches["verbosity"] = verbosity
        elif verbosity is not None:
            ignored.add("text.verbosity")
        return all_switches(request.chat_template_kwargs, switches)

    # --- answers ----------------------------------------------------------------------------------

    def body(self, parsed: ParsedRequest, result: CompletionResult) -> dict[str, Any]:
        return {**self._answer(parsed, result), **self._echo(parsed, result)}

    def _answer(self, parsed: ParsedRequest, result: CompletionResult) -> dict[str, Any]:
        details: RequestDetails = parsed.original
        return {
            "id": result.id,
            "object": "response",
            "created_at": result.created,
            **state_of(result),
            "output": output_of(result, self.encoder, details.names, encrypted=details.encrypted),
            "usage": usage_of(result, self.encoder),
        }

    def _echo(self, parsed: ParsedRequest, result: CompletionResult) -> dict[str, Any]:
        """Return the fields of the request that the response repeats."""
        details: RequestDetails = parsed.original
        request = details.request
        choice: Any = request.tool_choice or "auto"
        if isinstance(choice, FunctionChoice):
            choice = choice.model_dump(exclude_none=True)
        reasoning, text = request.reasoning, request.text
        form = {"format": {"type": "text"}}
        return {
            "model": result.model,
            "instructions": request.instructions,
            "metadata": details.metadata,
            "tools": request.tools or [],
            "tool_choice": choice,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "reasoning": reasoning.model_dump() if reasoning is not None else None,
            "text": {**form, **(text.model_dump(by_alias=True, exclude_none=True) if text else {})},
            "store": request.store,
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
        }

    def writer(self, parsed: ParsedRequest, result: CompletionResult) -> ResponsesWriter:
        response = {
            "id": result.id,
            "object": "response",
            "created_at": result.created,
            "status": "in_progress",
            "incomplete_details": None,
            "error": None,
            "output": [],
            "usage": None,
            **self._echo(parsed, result),
        }
        details: RequestDetails = parsed.original
        return self.writer_type(
            result, response, self.encoder, details.names, encrypted=details.encrypted
        )

    def refusal(self, error: ApiError) -> dict[str, Any]:
        return renamed(error, _PARAMETER_NAMES).body

    def stored(self, parsed: ParsedRequest, result: CompletionResult) -> StoredResponse | None:
        """Return the response, so that `previous_response_id` can refer to it. Return None if the
        request's `store` is false.
        """
        request: ResponsesRequest = parsed.original.request
        if not request.store:
            return None
        echo, answer = orjson.dumps(self._echo(parsed, result)), self._answer(parsed, result)
        return StoredResponse(result.id, request.instructions or "", echo, orjson.dumps(answer))


def not_found(response_id: str, param: str | None = None) -> ApiError:
    """Return the error for a response that is not stored."""
    problem = (
        f"there is no response {response_id!r} in this session. A response is kept until its "
        "session ends, unless its request has store: false. A request that names no session finds "
        "only responses to such requests"
    )
    return ApiError(404, "response_not_found", problem, param=param)


def _format(request: ResponsesRequest) -> dict[str, Any]:
    """Return `text.format` as the `response_format` of chat completions."""
    chosen = request.text.format if request.text is not None else None
    if chosen is None:
        return {}
    if chosen.type != "json_schema":
        return {"response_format": {"type": chosen.type}}
    if chosen.schema_ is None:
        problem = "text.format.schema is missing"
        raise invalid("text.format.schema", problem)
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": chosen.schema_}}}


# --- the request ----------------------------------------------------------------------------------


class Reasoning(Body):
    """The reasoning effort. `summary` and `generate_summary` have no effect: the reasoning is
    always returned in full. `context` and `mode` must be OpenAI's defaults.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextFormat(Body):
    """An output format: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """The output format and the verbosity."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionChoice(Body):
    """The function or the custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ResponsesRequest(Common):
    """`POST /v1/responses`. `service_tier` and `stream_options` do not affect the answer.
    `client_metadata` labels the trajectory. Only this endpoint has `chat_template_kwargs`.
    """

    input: str | list[Any]
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    previous_response_id: str | None = None
    store: bool = True
    include: list[Literal["reasoning.encrypted_content"]] = Field(default=[])
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: Literal[0] | None = None
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    client_metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
