"""Convert Anthropic's content blocks and tools to the messages and tools of chat completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from pydantic import Field

from toolroll.endpoint.dialects.blocks import (
    arguments_of,
    call_of,
    content_of,
    entries,
    function_tool,
    is_function,
    mapping,
    part_text,
    shown,
    text,
    text_parts,
    unknown_type,
)
from toolroll.endpoint.endpoint_settings import StopList
from toolroll.endpoint.errors import invalid
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.endpoint.requests.request_bodies import Body, Common, NamedChoice, NamedFunction
from toolroll.rollout.types import Message, Tool

PARAGRAPH = "\n\n"
"""The separator between the text blocks of a system prompt, a user message or a tool result."""

_TEXT = ("text",)
_TOOL = frozenset(
    {"type", "name", "description", "input_schema", "strict", "cache_control"}
    | {"eager_input_streaming"}
)

_BLOCK = frozenset({"type", "cache_control"})
_FIELDS = {
    "tool_result": _BLOCK | {"tool_use_id", "content", "is_error"},
    "tool_use": _BLOCK | {"id", "name", "input", "caller"},
    "thinking": _BLOCK | {"thinking", "signature"},
}

_FILLER = "[System: Empty message content sanitised to satisfy protocol]"
"""litellm's placeholder for the text of a reply that contains only calls."""


def read_blocks(
    values: Sequence[Any], ignored: IgnoredFields, *, images: bool = False
) -> list[Message]:
    """Return Anthropic's messages as chat messages. Raise `ApiError`, with the location, if a block
    cannot be converted. `ignored` gets the fields that change no token. `images`: users and tools
    may show images.
    """
    kinds = (*_TEXT, "image") if images else _TEXT
    messages: list[Message] = []
    for message, place in entries(values, "messages"):
        ignored.add_others(message, ("role", "content", "cache_control"), place)
        role, content, path = message.get("role"), message.get("content"), f"{place}.content"
        if role == "assistant":
            messages.append(_assistant(content, path, ignored))
        elif role == "user":
            messages += _user(content, path, kinds, ignored)
        elif role == "system":
            joined_text = text_parts(content, path, _TEXT, PARAGRAPH, ignored)
            messages.append({"role": role, "content": joined_text})
        else:
            problem = f"{place}.role is {role!r}; it must be user, assistant or system"
            raise invalid(f"{place}.role", problem)
    return messages


def _user(
    content: Any, place: str, kinds: Collection[str], ignored: IgnoredFields
) -> list[Message]:
    """Convert a user message to chat messages: one for each tool result, and one for each run of
    blocks of `kinds` between tool results.
    """
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not isinstance(content, list) or not content:
        raise invalid(place, f"{place} must be text or blocks")
    messages: list[Message] = []
    for is_result, blocks in groupby(entries(content, place), _is_result):
        if is_result:
            messages += [_result(block, path, kinds, ignored) for block, path in blocks]
        else:
            messages.append({"role": "user", "content": shown(blocks, kinds, PARAGRAPH, ignored)})
    return messages


def _is_result(entry: tuple[Mapping[str, Any], str]) -> bool:
    return entry[0].get("type") == "tool_result"


def _result(
    block: Mapping[str, Any], place: str, kinds: Collection[str], ignored: IgnoredFields
) -> Message:
    """Return a tool result as a message. Chat templates cannot render `is_error`, so it has an
    effect only if the content is empty: the content becomes "error".
    """
    ignored.add_others(block, _FIELDS["tool_result"], place)
    content = block.get("content") or ""
    answer = content_of(content, f"{place}.content", kinds, PARAGRAPH, ignored)
    if not answer and block.get("is_error"):
        answer = "error"
    return {"role": "tool", "tool_call_id": text(block, "tool_use_id", place), "content": answer}


def _assistant(content: Any, place: str, ignored: IgnoredFields) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    if not isinstance(content, list):
        raise invalid(place, f"{place} must be text or blocks")
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, path in entries(content, place):
        kind = block.get("type")
        if kind == "text":
            texts.append(part_text(block, path, ignored))
        elif kind == "thinking":
            ignored.add_others(block, _FIELDS[kind], path)
            thoughts.append(text(block, "thinking", path))
        elif kind == "tool_use":
            ignored.add_others(block, _FIELDS[kind], path)
            tool_input = mapping(block.get("input", {}), f"{path}.input")
            name = text(block, "name", path)
            calls.append(call_of(text(block, "id", path), name, arguments_of(tool_input)))
        else:
            raise unknown_type(kind, path)
    if calls and texts == [_FILLER]:
        texts = []
    message: Message = {"role": "assistant", "content": "".join(texts) or None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


# --- tools ----------------------------------------------------------------------------------------


def read_tools(values: Sequence[Any], *, drop: bool) -> list[Tool]:
    """Return Anthropic's tools in the form of chat completions. `drop`: True leaves out tools that
    run on Anthropic's servers, and False refuses them.
    """
    tools: list[Tool] = []
    for tool, place in entries(values, "tools"):
        if not is_function(tool, (None, "custom"), _TOOL, place, drop=drop):
            continue
        schema = mapping(tool.get("input_schema"), f"{place}.input_schema")
        tools.append(function_tool(tool, place, schema))
    return tools


def tool_choice(request: MessagesRequest) -> dict[str, Any]:
    """Return Anthropic's `tool_choice` as the fields of chat completions."""
    choice = request.tool_choice
    if choice is None:
        return {}
    if choice.type == "tool" and not choice.name:
        raise invalid("tool_choice.name", "tool_choice.name is missing")
    if choice.type != "tool" and choice.name:
        problem = f"tool_choice.name has no meaning for the type {choice.type!r}: leave it out"
        raise invalid("tool_choice.name", problem)
    named = NamedChoice(function=NamedFunction(name=choice.name or ""))
    return {
        "tool_choice": {"auto": "auto", "none": "none", "any": "required"}.get(choice.type, named),
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def response_format(request: MessagesRequest) -> dict[str, Any]:
    """Return `output_config.format` as the `response_format` of chat completions."""
    chosen = request.output_config.format if request.output_config is not None else None
    if chosen is None:
        return {}
    form = {"type": "json_schema", "json_schema": {"schema": chosen.schema_}}
    return {"response_format": form}


# --- the request ----------------------------------------------------------------------------------


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


class MessagesRequest(Common):
    """`POST /v1/messages`. `cache_control`, `service_tier` and `inference_geo` do not affect the
    answer, nor does `metadata`, of which `lineage_of` keeps the labels. Only this endpoint has
    `chat_template_kwargs`.
    """

    max_tokens: int | None = Field(default=None, ge=1)
    messages: list[Any] = Field(min_length=1)
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    stop_sequences: StopList = None
    top_k: int | None = Field(default=None, ge=0)
    cache_control: dict[str, Any] | None = None
    inference_geo: str | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
