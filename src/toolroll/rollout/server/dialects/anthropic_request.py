"""The request of Anthropic's `POST /v1/messages`, as pydantic models. `messages_blocks` reads the
content blocks.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from toolroll.rollout.server.requests.protocol import Body
from toolroll.rollout.server.sampling_defaults import StopList


class Thinking(Body):
    """Turns thinking on or off. `adaptive`: use the template's default."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized"] | None = None
    """Has no effect: the reasoning is always returned in full."""


class OutputFormat(Body):
    """An output format: JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The effort and the output format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(Body):
    """Tells which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ContextEdit(Body):
    """An edit of the history. It is valid only if it keeps all reasoning, so it has no effect."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Edits of the history that the client requests. Only edits that remove nothing are valid."""

    edits: list[ContextEdit] = Field(default=[])


class MessagesRequest(Body):
    """`POST /v1/messages`. `cache_control`, `metadata`, `service_tier` and `inference_geo` do not
    affect the answer. `session_id` and `chat_template_kwargs` are fields that only this endpoint
    has.
    """

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    messages: list[Any] = Field(min_length=1)
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    stop_sequences: StopList = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stream: bool = False
    cache_control: dict[str, Any] | None = None
    inference_geo: str | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    session_id: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
