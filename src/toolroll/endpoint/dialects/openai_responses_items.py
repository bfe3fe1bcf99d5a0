"""Convert the items and tools of OpenAI's Responses to the messages and tools of chat completions.

Invariants: the items of one reply (reasoning, text, tool calls) become one assistant message. Ids
and statuses of items are ignored. A custom tool, whose input is a text, is offered to the model as
a function with the argument `input`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from toolroll.endpoint.dialects.blocks import (
    call_of,
    content_of,
    entries,
    function_tool,
    is_function,
    mapping,
    only,
    optional_text,
    text,
    text_parts,
    unknown_type,
)
from toolroll.endpoint.errors import ApiError, invalid, refused
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.rollout.types import Message, Tool

_TEXTS = ("input_text", "output_text", "text")
_ITEM = frozenset({"type", "id", "status", "internal_chat_message_metadata_passthrough"})
"""Fields that are not part of the conversation. The last one is Codex' metadata for OpenAI."""
_FIELDS = {
    "message": _ITEM | {"role", "content", "phase"},
    "function_call": _ITEM | {"call_id", "name", "namespace", "arguments", "caller"},
    "function_call_output": _ITEM | {"call_id", "output"},
    "custom_tool_call": _ITEM | {"call_id", "name", "namespace", "input", "caller"},
    "custom_tool_call_output": _ITEM | {"call_id", "output"},
    "reasoning": _ITEM | {"summary", "content", "encrypted_content"},
}
_ROLES = ("user", "system", "developer", "assistant")
_FUNCTION = frozenset({"type", "name", "description", "parameters", "strict"})
_CUSTOM = frozenset({"type", "name", "description", "format"})
_NAMESPACE = frozenset({"type", "name", "description", "tools"})

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_FREE_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The schema with which a custom tool is offered."""

_TAGGED = re.compile(r"<think>\n(.*)\n</think>", re.DOTALL)
"""The form in which pydantic-ai sends reasoning back: as a separate message."""

FindItem = Callable[[str], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    custom: bool = False


Names = dict[str, ClientTool]
"""Maps the name that the model sees to the tool, if the tool is custom or in a namespace."""


def read_items(
    items: str | Sequence[Any],
    ignored: IgnoredFields,
    *,
    reasons: bool,
    find: FindItem,
    images: bool = False,
) -> list[Message]:
    """Return the input as chat messages. Raise `ApiError`, with the location, if an item cannot be
    converted. `ignored` gets the fields that change no token. `find` returns the item with an id,
    for references.

    `reasons`: True if the model's parser supports reasoning. Then, at the start of a reply, an
    assistant message `<think>...</think>` is read as reasoning. Otherwise such a message stays
    text. `images`: users and tools may show images.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    kinds = (*_TEXTS, "input_image") if images else _TEXTS
    messages: list[Message] = []
    before = None
    for item, place in entries(items, "input"):
        untyped = "message" if "role" in item else "item_reference" if "id" in item else None
        kind = item.get("type") or untyped
        if kind == "item_reference":
            item = _referenced(item, place, ignored, find)
            kind = item["type"]
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise unknown_type(kind, place)
        ignored.add_others(item, _FIELDS[kind], place)
        if kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(_output(item, place, kinds, ignored))
        elif kind == "message" and item.get("role") != "assistant":
            messages.append(_message(item, place, kinds, ignored))
        else:
            first = not (before or "").startswith("assistant")
            if reasons and kind == "message" and first:  # later in a reply, the tags are text
                item = _untagged(item, place, ignored)
                kind = item.get("type") or kind
            kind = f"assistant {kind}"
            message = _assistant(messages, both=kind == before == "assistant message")
            _add(message, item, place, ignored)
        before = kind
    return messages


def _referenced(
    item: Mapping[str, Any], place: str, ignored: IgnoredFields, find: FindItem
) -> Mapping[str, Any]:
    ignored.add_others(item, ("type", "id"), place)
    item_id = text(item, "id", place)
    referenced = find(item_id)
    if referenced is None:
        problem = (
            f"{place}: there is no item {item_id!r} in this session. Only items of stored "
            "responses of the same session can be referred to. With store: false, clients send "
            "the items themselves"
        )
        raise ApiError(404, "item_not_found", problem, param=f"{place}.id")
    return referenced


def _message(
    item: Mapping[str, Any], place: str, kinds: Collection[str], ignored: IgnoredFields
) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        problem = f"{place}.role is {role!r}; it must be one of {', '.join(_ROLES)}"
        raise invalid(f"{place}.role", problem)
    kinds = kinds if role == "user" else _TEXTS
    content = content_of(item.get("content"), f"{place}.content", kinds, "", ignored)
    return {"role": role, "content": content}


def _output(
    item: Mapping[str, Any], place: str, kinds: Collection[str], ignored: IgnoredFields
) -> Message:
    answer = content_of(item.get("output"), f"{place}.output", kinds, "", ignored)
    return {"role": "tool", "tool_call_id": text(item, "call_id", place), "content": answer}


def _assistant(messages: list[Message], *, both: bool) -> Message:
    """Return the assistant message to which the next item belongs: the last of `messages`, or a new
    one, which is added to `messages`. `both`: True if the next item and the item before it are
    both messages. Then the next item starts a new reply.
    """
    if both or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add(message: Message, item: Mapping[str, Any], place: str, ignored: IgnoredFields) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        content = text_parts(item.get("content"), f"{place}.content", _TEXTS, "", ignored)
        message["content"] = (message["content"] or "") + content
    elif kind == "reasoning":
        thought = _thought(item, place, ignored)
        if thought:
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
    else:
        name = text(item, "name", place)
        if item.get("namespace"):
            name = flat_name(text(item, "namespace", place), name)
        if kind == "custom_tool_call":
            arguments = orjson.dumps({"input": text(item, "input", place)}).decode()
        else:
            arguments = text(item, "arguments", place)
        call = call_of(text(item, "call_id", place), name, arguments)
        message.setdefault("tool_calls", []).append(call)


def _untagged(item: Mapping[str, Any], place: str, ignored: IgnoredFields) -> Mapping[str, Any]:
    """Return a reasoning item if the text of the assistant message `item` is `<think>...</think>`.
    Otherwise return `item`.
    """
    content = text_parts(item.get("content"), f"{place}.content", _TEXTS, "", ignored)
    tagged = _TAGGED.fullmatch(content)
    if tagged is None:
        return item
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": tagged[1]}]}


def _thought(item: Mapping[str, Any], place: str, ignored: IgnoredFields) -> str:
    for name, kinds in (("summary", ("summary_text",)), ("content", ("reasoning_text", "text"))):
        thought = text_parts(item.get(name) or "", f"{place}.{name}", kinds, "", ignored)
        if thought:
            return thought
    return ""


# --- tools ----------------------------------------------------------------------------------------


def read_tools(values: Sequence[Any], *, drop: bool) -> tuple[list[Tool], Names]:
    """Return the tools in the form of chat completions, and those that the client knows
    differently. `drop`: True leaves out tools that cannot be offered, such as those that run on the
    provider's servers, and False refuses them.
    """
    tools: list[Tool] = []
    names: Names = {}
    for tool, place, namespace, about in _flattened(values):
        custom = tool.get("type") == "custom"
        fields = _CUSTOM if custom else _FUNCTION
        if not is_function(tool, ("function", "custom"), fields, place, drop=drop):
            continue
        if custom and not _is_free_text(tool, place, drop=drop):
            continue
        description = optional_text(tool, "description", place)
        described = {**tool, "description": "\n\n".join(filter(None, (about, description))) or None}
        schema = _FREE_TEXT if custom else tool.get("parameters")
        schema = _NO_PARAMETERS if schema is None else mapping(schema, f"{place}.parameters")
        chat = function_tool(described, place, schema)
        if namespace or custom:
            name = chat["function"]["name"]
            flat = flat_name(namespace, name) if namespace else name
            chat["function"]["name"] = flat
            names[flat] = ClientTool(name, namespace, custom)
        tools.append(chat)
    return tools, names


def _is_free_text(tool: Mapping[str, Any], place: str, *, drop: bool) -> bool:
    """Return True if the input of the custom tool `tool` may be any text. If a grammar restricts
    it, return False if `drop` is True, and raise `ApiError` if not.
    """
    form = mapping(tool.get("format") or {"type": "text"}, f"{place}.format")
    if form.get("type") == "text" or drop:
        return form.get("type") == "text"
    problem = (
        f"{place}.format cannot be honored, because its type is {form.get('type')!r}: the engine "
        "cannot enforce a grammar within an argument of a call. Leave the tool out, or serve with "
        "--server-tools drop"
    )
    raise refused(f"{place}.format", problem)


def _flattened(values: Sequence[Any]) -> Iterator[tuple[Mapping[str, Any], str, str, str]]:
    """Yield each tool with its location, and with the name and description of its namespace."""
    for tool, place in entries(values, "tools"):
        if tool.get("type") != "namespace":
            yield tool, place, "", ""
            continue
        only(tool, _NAMESPACE, place)
        members = tool.get("tools")
        if not isinstance(members, list):
            raise invalid(f"{place}.tools", f"{place}.tools must be a list")
        name, about = text(tool, "name", place), optional_text(tool, "description", place)
        for inner_tool, path in entries(members, f"{place}.tools"):
            yield inner_tool, path, name, about


def flat_name(namespace: str, name: str) -> str:
    """Return the name that the model sees for a tool in a namespace."""
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"
