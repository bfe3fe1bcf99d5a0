"""Helpers that Messages and Responses share. They read the parts of a message. `place` is the
location of a value in the request, such as `messages[0].content`, for error messages.

Invariants: text is joined, never changed. A part that no chat template can render is refused, and
the error gives its location. A marker that only controls a provider's cache is ignored.
Of the labels of a request, those for the client's installation, device or account are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, Literal

import orjson

from toolroll.endpoint.conversation.messages import with_role
from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.errors import (
    ApiError,
    UnknownFieldError,
    invalid,
    not_rendered,
    refused,
)
from toolroll.endpoint.requests.ignored_fields import IgnoredFields, never
from toolroll.endpoint.requests.received import too_deep
from toolroll.endpoint.requests.request_bodies import ChatRequest, Common
from toolroll.rollout.types import Message, Tool

_UNPARSED = "_unparsed_arguments"
"""If the arguments of a call cannot be its input, the input has only this key, and its value is the
text of the arguments. They cannot be the input if they are not a JSON object, are nested too deep,
or are an object with only this key and a text.
"""

_AROUND_INPUT = 5
"""The number of levels of a body around a call's input: body, messages, message, content, block."""

_TEXT_PART = frozenset(
    {"type", "text", "cache_control", "prompt_cache_breakpoint"}
    | {"citations", "annotations", "logprobs"}
)
_IMAGES = ("image", "input_image")
"""The types of images in Messages and in Responses."""
_PICTURES = ("image", "input_image", "image_url", "computer_screenshot")


def chat_request(request: Common, **fields: Any) -> ChatRequest:
    """Return the common fields of `request`, and `fields`, as a chat request. The messages are left
    out: a `ParsedRequest` has them apart.
    """
    common = {name: getattr(request, name) for name in Common.model_fields}
    chat = ChatRequest(messages=[None], **common, **fields)  # one, because an empty list is refused
    chat.messages = []
    return chat


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """Return `value`. Raise `ApiError` if it is not an object."""
    if not isinstance(value, Mapping):
        raise invalid(place, f"{place} must be an object")
    return value


def entries(values: Sequence[Any], place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each entry of `values`, the list at `place`, with the location of the entry. Raise
    `ApiError` if an entry is not an object.
    """
    for index, entry in enumerate(values):
        path = f"{place}[{index}]"
        yield mapping(entry, path), path


def text(fields: Mapping[str, Any], name: str, place: str) -> str:
    """Return the text `fields[name]`. Raise `ApiError` if it is not a string."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", f"{place}.{name} must be text")
    return value


def optional_text(fields: Mapping[str, Any], name: str, place: str) -> str:
    """Return the text `fields[name]`, or "" if it is missing or null. Raise `ApiError` if it is not
    a string.
    """
    return "" if fields.get(name) is None else text(fields, name, place)


def only(fields: Mapping[str, Any], names: Collection[str], place: str) -> None:
    """Raise `ApiError` if one of the `fields` is not null and has a name that is not in `names`."""
    for name, value in fields.items():
        if name not in names and value is not None:
            raise not_rendered(f"{place}.{name}")


def unknown_type(kind: Any, place: str) -> ApiError:
    """Return the error for a part whose type `kind` is not supported."""
    if kind in _PICTURES:
        problem = f"{place} is {kind!r}: this endpoint serves text only, no images"
    else:
        problem = f"{place} is {kind!r}, which no chat template renders"
    return refused(f"{place}.type", problem)


def part_text(part: Mapping[str, Any], place: str, ignored: IgnoredFields) -> str:
    """Return the text of a text part."""
    ignored.add_others(part, _TEXT_PART, place, never)
    return text(part, "text", place)


def text_parts(
    value: Any, place: str, kinds: Collection[str], glue: str, ignored: IgnoredFields
) -> str:
    """Return the text of `value`, which is a string or a list of parts. The type of each part must
    be one of `kinds`. The texts of the parts are joined with `glue`.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(place, f"{place} must be text or a list of parts")
    return glue.join(_text_of(part, path, kinds, ignored) for part, path in entries(value, place))


def _text_of(
    part: Mapping[str, Any], place: str, kinds: Collection[str], ignored: IgnoredFields
) -> str:
    kind = part.get("type")
    if kind not in kinds:
        raise unknown_type(kind, place)
    return part_text(part, place, ignored)


def content_of(
    value: Any, place: str, kinds: Collection[str], glue: str, ignored: IgnoredFields
) -> str | list[dict[str, Any]]:
    """Return the text of `value`, as `text_parts` does, or the parts of Chat Completions if it has
    images. The texts between two images are joined with `glue`.
    """
    if not isinstance(value, list):
        return text_parts(value, place, kinds, glue, ignored)
    return shown(entries(value, place), kinds, glue, ignored)


def shown(
    located: Iterable[tuple[Mapping[str, Any], str]],
    kinds: Collection[str],
    glue: str,
    ignored: IgnoredFields,
) -> str | list[dict[str, Any]]:
    """Return parts and their locations as `content_of` does."""
    parts: list[dict[str, Any]] = []
    for is_image, run in groupby(located, lambda entry: _is_image(entry[0], kinds)):
        if is_image:
            parts += [_image_part(part, path, ignored) for part, path in run]
        else:
            texts = [_text_of(part, path, kinds, ignored) for part, path in run]
            parts.append({"type": "text", "text": glue.join(texts)})
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return str(parts[0]["text"]) if parts else ""


def _is_image(part: Mapping[str, Any], kinds: Collection[str]) -> bool:
    return part.get("type") in _IMAGES and part["type"] in kinds


def _image_part(part: Mapping[str, Any], place: str, ignored: IgnoredFields) -> dict[str, Any]:
    if part["type"] == "image":
        ignored.add_others(part, ("type", "source", "cache_control"), place, never)
        source = mapping(part.get("source"), f"{place}.source")
        if source.get("type") != "base64":
            raise refused(f"{place}.source.type", f"{place}.source must have the type base64")
        kind, data = (text(source, name, f"{place}.source") for name in ("media_type", "data"))
        url = f"data:{kind};base64,{data}"
    else:
        ignored.add_others(part, ("type", "image_url"), place, never)
        url = text(part, "image_url", place)
    return {"type": "image_url", "image_url": {"url": url}}


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the form of chat completions."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def arguments_of(tool_input: Mapping[str, Any]) -> str:
    """Return the arguments of a tool call as JSON text. `tool_input` is the input of Anthropic's
    `tool_use` block. This is the inverse of `input_of`.
    """
    unparsed = _unparsed(tool_input)
    return orjson.dumps(tool_input).decode() if unparsed is None else unparsed


def input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call as the input of a `tool_use` block, which must be an
    object. Arguments that cannot be an input are wrapped in an object (see `_UNPARSED`).
    """
    tool_input = _object(arguments)
    return {_UNPARSED: arguments} if tool_input is None else tool_input


def input_json(arguments: str) -> str:
    """Return the JSON text of `input_of(arguments)`. This is `arguments` itself if possible."""
    if _object(arguments) is not None:
        return arguments
    return orjson.dumps({_UNPARSED: arguments}).decode()


def _object(arguments: str) -> dict[str, Any] | None:
    """Return the JSON object that `arguments` contains. Return None if `arguments` is not a JSON
    object, if it is nested too deep for a request, or if `arguments_of` would read it as wrapped
    arguments (see `_UNPARSED`).
    """
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(data, dict) or _unparsed(data) is not None:
        return None
    return None if too_deep(data, around=_AROUND_INPUT) else data


def _unparsed(tool_input: Mapping[str, Any]) -> str | None:
    """Return the arguments that `input_of` wrapped in `tool_input`, or None if not wrapped."""
    text = tool_input.get(_UNPARSED)
    return text if len(tool_input) == 1 and isinstance(text, str) else None


def system_places(messages: Sequence[Message], *, anywhere: bool) -> list[Message]:
    """Return `messages` with system messages only at positions where the chat template renders
    them.

    `anywhere`: True if the template renders system messages at every position. If False, the system
    messages at the start are joined into one, and later system messages become user messages.
    """
    if anywhere:
        return list(messages)
    leading = [
        str(message["content"])
        for message in takewhile(lambda message: message["role"] == "system", messages)
    ]
    joined: list[Message] = [{"role": "system", "content": "\n\n".join(leading)}] if leading else []
    return joined + with_role(messages[len(leading) :], "system", "user")


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return `error` with the dialect's name for the field at fault, in `param` and in the message.
    `names` maps field names of chat completions to the dialect's.
    """
    param = error.param
    if param is None or isinstance(error, UnknownFieldError):
        return error  # the client sent this name
    name = names.get(param, param.replace(".function.strict", ".strict"))
    if name == param:
        return error
    # the message of an overflow names no field: "messages" in it is the engine's own word
    named = error.code != "context_length_exceeded"
    problem = str(error).replace(param, name) if named else str(error)
    return ApiError(error.status, error.code, problem, param=name, retry=error.retry)


# --- tools ----------------------------------------------------------------------------------------


def is_function(
    tool: Mapping[str, Any],
    kinds: Collection[str | None],
    fields: Collection[str],
    place: str,
    *,
    drop: bool,
) -> bool:
    """Return True if `tool` is a function that the client runs: its type is in `kinds`. Any other
    tool runs on the provider's servers. For such a tool, return False if `drop` is True, and raise
    `ApiError` if not.

    Raise `ApiError` for a function that has a field that is not in `fields`.
    """
    kind = tool.get("type")
    if kind not in kinds:
        if drop:
            return False
        problem = f"{place} is {kind!r}: this endpoint has only tools that the client runs"
        raise refused(
            f"{place}.type", f"{problem}. Leave it out, or serve with --server-tools drop"
        )
    callers = tool.get("allowed_callers")
    only({**tool, "allowed_callers": None if callers == ["direct"] else callers}, fields, place)
    return True


def function_tool(tool: Mapping[str, Any], place: str, parameters: Mapping[str, Any]) -> Tool:
    """Return the function `tool`, with the schema `parameters`, as a chat tool. Raise `ApiError` if
    its name, description or `strict` is not valid.
    """
    name, strict = text(tool, "name", place), tool.get("strict")
    if not 0 < len(name) <= 256:
        problem = f"{place}.name must have 1 to 256 characters"
        raise invalid(f"{place}.name", problem)
    if not isinstance(strict, bool | None):
        problem = f"{place}.strict must be true or false"
        raise invalid(f"{place}.strict", problem)
    function: dict[str, Any] = {"name": name}
    if tool.get("description") is not None:
        function["description"] = text(tool, "description", place)
    function["parameters"] = dict(parameters)
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


# --- switches of the template ---------------------------------------------------------------------


_THINKING = ("enable_thinking", "thinking")


def all_switches(switches: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return all switches of a request. `switches` are its `chat_template_kwargs`, and `others` are
    the switches that its other fields set. Raise `ApiError` if the two set a switch to different
    values.
    """
    for name, value in others.items():
        if name in switches and switches[name] != value:
            place = f"chat_template_kwargs.{name}"
            problem = f"{place} contradicts another field that sets the same switch: give one"
            raise invalid(place, problem)
    return {**switches, **others}


def thinking_switches(
    templates: TemplateCache, thinking: Literal["enabled", "disabled"], *, reasons: bool
) -> dict[str, Any]:
    """Return the switch that turns thinking on or off.

    If the template has no such switch, thinking is always on if `reasons` is True (the model's
    parser supports reasoning), and always off if not. Return an empty dict if this is what
    `thinking` asks for. Otherwise raise `ApiError`.
    """
    enabled = thinking == "enabled"
    name = next((name for name in _THINKING if name in templates.variables), None)
    if name is not None:
        return {name: enabled}
    if enabled == reasons:
        return {}
    problem = f"the chat template has no switch for thinking ({' or '.join(_THINKING)})"
    raise refused("thinking.type", f"thinking cannot be {thinking}: {problem}. Leave thinking out")


# --- labels of a request --------------------------------------------------------------------------


_LINEAGE_LABELS = frozenset(
    (
        "agent_name context_window_id request_kind root_turn_id session_id thread_id "
        "thread_source turn_id window_number"
    ).split()
)

_ATTRIBUTION = "x-anthropic-billing-header"
_ATTRIBUTION_LINE = re.compile(rf"{_ATTRIBUTION}:([^\n]*)\n*")


def split_attribution(system: str) -> tuple[dict[str, str], str]:
    """Return the label in the first line of a system prompt, if there is one, and the rest of the
    prompt.

    Claude Code begins its system prompt with a line for Anthropic's servers, which contains a hash
    of the request. It is a label of the request, not a part of the conversation.
    """
    line = _ATTRIBUTION_LINE.match(system)
    if line is None:
        return {}, system
    return {_ATTRIBUTION: line[1].strip()}, system[line.end() :]


def lineage_of(metadata: Any) -> dict[str, str]:
    """Return the conversation labels in `metadata`: the names in `_LINEAGE_LABELS`, and names that
    start with `parent_`. Integers become text. Labels whose value is empty, or neither text nor an
    integer, are left out. `metadata` is an object, or the JSON text of an object. For anything
    else, return an empty dict.

    A value of the object may itself be the JSON text of an object (Codex's `x-codex-turn-metadata`,
    Claude Code's `user_id`). The labels in that inner object are returned too.
    """
    lineage: dict[str, str] = {}
    labels = _labels(metadata)
    for name, value in labels.items():
        if name in _LINEAGE_LABELS or name.startswith("parent_"):
            if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
                lineage[name] = str(value)
        elif isinstance(value, str):
            nested = _labels(value)
            lineage |= {key: text for key, text in lineage_of(nested).items() if key not in lineage}
    return lineage


def _labels(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return {}
    return value if isinstance(value, Mapping) else {}
