"""The request of OpenAI's `POST /v1/responses`, as pydantic models. `responses_items` reads the
items.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from toolroll.rollout.server.requests.protocol import Body, StreamOptions


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


class ResponsesRequest(Body):
    """`POST /v1/responses`. `service_tier` and `stream_options` do not affect the answer.
    `client_metadata` labels the trajectory. `session_id` and `chat_template_kwargs` are fields that
    only this endpoint has.
    """

    model: str | None = None
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
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: Literal[0] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    client_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
