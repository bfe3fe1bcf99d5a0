"""Helpers that Messages and Responses share. They read the parts of a message. `place` is the
location of a value in the request, such as `messages[0].content`, for error messages.

Invariants: text is joined, never changed. A part that no chat template can render is refused, and
the error gives its location. A marker that only controls a provider's cache is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import orjson

from toolroll.rollout.server.conversation.messages import with_role
from toolroll.rollout.server.errors import (
    ApiError,
    UnknownFieldError,
    invalid,
    not_rendered,
    refused,
)
from toolroll.rollout.server.requests.nesting import too_deep
from toolroll.rollout.types import Message

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
_PICTURES = ("image", "input_image", "image_url", "computer_screenshot")


def mapping(given: Any, place: str) -> Mapping[str, Any]:
    """Return `given`. Raise `ApiError` if it is not an object."""
    if not isinstance(given, Mapping):
        raise invalid(place, f"{place} must be an object")
    return given


def entries(given: Sequence[Any], place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each entry of `given`, the list at `place`, with the location of the entry. Raise
    `ApiError` if an entry is not an object.
    """
    for index, entry in enumerate(given):
        where = f"{place}[{index}]"
        yield mapping(entry, where), where


def text(given: Mapping[str, Any], name: str, place: str) -> str:
    """Return the text `given[name]`. Raise `ApiError` if it is not a string."""
    value = given.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", f"{place}.{name} must be text")
    return value


def optional_text(given: Mapping[str, Any], name: str, place: str) -> str:
    """Return the text `given[name]`, or "" if it is missing or null. Raise `ApiError` if it is not
    a string.
    """
    return "" if given.get(name) is None else text(given, name, place)


def only(given: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Raise `ApiError` if `given` has a field that is not null and whose name is not in `known`."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise not_rendered(f"{place}.{name}")


def unknown_type(kind: Any, place: str) -> ApiError:
    """Return the error for a part whose type `kind` is not supported."""
    if kind in _PICTURES:
        words = f"{place} is {kind!r}: this endpoint serves text only, no images"
    else:
        words = f"{place} is {kind!r}, which no chat template renders"
    return refused(f"{place}.type", words)


def part_text(part: Mapping[str, Any], place: str) -> str:
    """Return the text of a text part. Raise `ApiError` if the part has an unknown field."""
    only(part, _TEXT_PART, place)
    return text(part, "text", place)


def text_parts(given: Any, place: str, kinds: Collection[str], glue: str) -> str:
    """Return the text of `given`, which is a string or a list of parts. The type of each part must
    be one of `kinds`. The texts of the parts are joined with `glue`.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid(place, f"{place} must be text or a list of parts")
    found = []
    for part, where in entries(given, place):
        kind = part.get("type")
        if kind not in kinds:
            raise unknown_type(kind, where)
        found.append(part_text(part, where))
    return glue.join(found)


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the form of chat completions."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def arguments_of(given: Mapping[str, Any]) -> str:
    """Return the arguments of a tool call as JSON text. `given` is the input of Anthropic's
    `tool_use` block. This is the inverse of `input_of`.
    """
    unparsed = _unparsed(given)
    return orjson.dumps(given).decode() if unparsed is None else unparsed


def input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call as the input of a `tool_use` block, which must be an
    object. Arguments that cannot be an input are wrapped in an object (see `_UNPARSED`).
    """
    found = _object(arguments)
    return {_UNPARSED: arguments} if found is None else found


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
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or _unparsed(found) is not None:
        return None
    return None if too_deep(found, around=_AROUND_INPUT) else found


def _unparsed(given: Mapping[str, Any]) -> str | None:
    """Return the arguments that `input_of` wrapped in `given`. Return None if `given` is an
    ordinary input.
    """
    text = given.get(_UNPARSED)
    return text if len(given) == 1 and isinstance(text, str) else None


def system_places(messages: Sequence[Message], *, anywhere: bool) -> list[Message]:
    """Return `messages` with system messages only at positions where the chat template renders
    them.

    `anywhere`: True if the template renders system messages at every position. If False, the system
    messages at the start are joined into one, and later system messages become user messages.
    """
    if anywhere:
        return list(messages)
    head = [
        str(message["content"])
        for message in takewhile(lambda message: message["role"] == "system", messages)
    ]
    joined: list[Message] = [{"role": "system", "content": "\n\n".join(head)}] if head else []
    return joined + with_role(messages[len(head) :], "system", "user")


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return `error` with the dialect's name for the field at fault, in `param` and in the message.
    `names` maps field names of chat completions to the dialect's.
    """
    param = error.param
    if param is None or isinstance(error, UnknownFieldError):
        return error  # the client sent this name
    own = names.get(param, param.replace(".function.strict", ".strict"))
    if own == param:
        return error
    words = str(error).replace(param, own)
    return ApiError(error.status, error.code, words, param=own, retry=error.retry)
