"""Validate the messages of a request, compare them with the messages of earlier requests and
replies in the same session, and say how they differ, for the `fork_reason`.

Invariants: differences that client libraries introduce on their own are ignored (the order of JSON
keys in arguments, arguments that equal their default in the tool's schema, the ids of tool calls,
`null` for an empty content, dropped reasoning, text in parts). All other differences count. A field
that chat templates do not show is ignored and counted. It is refused by name if it has content, or
if the served template may show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import orjson

from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.errors import ApiError, invalid, refused
from toolroll.endpoint.requests.ignored_fields import IgnoredFields, has_content, never
from toolroll.endpoint.requests.received import DEEPEST, too_deep, too_deep_text
from toolroll.endpoint.requests.tool_list import Schemas
from toolroll.parsers.reading.resolve import Schema
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.media import image_urls
from toolroll.rollout.template.render import plain_content
from toolroll.rollout.types import Message

_INERT = frozenset({"provider_specific_fields", "annotations"})
"""Fields that client libraries add to messages and that models never see."""

_MESSAGE = frozenset({"role", "content", "name", *_INERT})
_ROLES = {
    "system": _MESSAGE,
    "developer": _MESSAGE,
    "user": _MESSAGE,
    "tool": _MESSAGE | {"tool_call_id"},
    "assistant": _MESSAGE | {"tool_calls", "reasoning_content", "reasoning"},
}
_CALL = frozenset({"id", "type", "function", "index", *_INERT})
_FUNCTION = frozenset({"name", "arguments", "parsed_arguments", *_INERT})
"""The openai SDK adds `index` and `parsed_arguments`; models never see them."""

_PART = frozenset({"type", "text", "cache_control", *_INERT})
_IMAGE = frozenset({"type", "image_url", "cache_control"})

LAST_OF_PROMPT = ", the last message of its prompt"
"""The end of the `fork_reason` if a client appends a message for one request only."""

Digest = bytes
START: Digest = b""


def read_messages(
    values: Sequence[Any],
    templates: TemplateCache,
    ignored: IgnoredFields,
    *,
    answer: bool = True,
) -> list[Message]:
    """Return `values` as plain messages. Text parts are joined, and empty fields are left out.

    If the template does not mention the role `developer`, messages with this role become system
    messages. `ignored` gets the fields that change no token. `answer`: the request asks for a new
    reply, so the last message must not be the assistant's. Raise `ApiError` if a message is not
    valid.
    """
    if not values:
        raise _invalid_message("messages", "messages is empty")
    reader = _Reader(templates, ignored)
    messages = [reader.read(message, f"messages[{index}]") for index, message in enumerate(values)]
    if not templates.developer:
        messages = with_role(messages, "developer", "system")
    if answer and messages[-1]["role"] == "assistant":
        raise _invalid_message(
            "messages",
            "the last message is from the assistant: to continue it, set "
            "continue_final_message: true",
        )
    return messages


def with_role(messages: Sequence[Message], role: str, new: str) -> list[Message]:
    """Return `messages`, but with the role `new` in those that have the role `role`."""
    return [{**m, "role": new} if m["role"] == role else m for m in messages]


class _Reader:
    """Reads messages for a chat template."""

    def __init__(self, templates: TemplateCache, ignored: IgnoredFields) -> None:
        self._may_show = templates.may_show
        self._images = templates.images
        self._ignored = ignored

    def _refuses(self, name: str, value: Any, *, role: str | None = None) -> bool:
        return has_content(name, value) or self._may_show(name, value, role=role)

    def read(self, raw: Any, place: str) -> Message:
        """Return the message `raw`, which is at `place` in the body."""
        if not isinstance(raw, Mapping):
            raise invalid(place, f"{place} is not an object with a role")
        role = raw.get("role")
        fields = _ROLES.get(role) if isinstance(role, str) else None
        if fields is None:
            problem = f"{place}.role is {role!r}; it must be one of {', '.join(_ROLES)}"
            raise _invalid_message(f"{place}.role", problem)
        message: Message = {"role": role}
        for name, value in raw.items():
            is_field = name in fields and name not in _INERT
            if is_field and (value is not None or name == "content"):
                message[name] = value
        if raw.keys() - fields:
            self._ignored.add_others(raw, fields, place, partial(self._refuses, role=role))
        content = message.get("content")
        takes_images = self._images and role in ("user", "tool")
        shown = takes_images and isinstance(content, list) and any(image_urls([message]))
        if shown:
            message["content"] = [
                self._part(part, f"{place}.content[{index}]")
                for index, part in enumerate(message["content"])
            ]
        elif not isinstance(content, str | None):
            try:
                message = plain_content(message)
            except (TemplateError, KeyError) as error:
                raise refused(f"{place}.content", f"{place}: {error}") from error
            for index, part in enumerate(raw["content"]):
                self._ignored.add_others(part, _PART, f"{place}.content[{index}]", never)
        if role == "assistant":
            return self._assistant(message, place)
        for name, value in (
            ("content", "" if shown else message.get("content")),
            ("tool_call_id", message.get("tool_call_id", "")),
        ):
            if not isinstance(value, str):
                raise _invalid_message(f"{place}.{name}", f"{place}.{name} must be text")
        return message

    def _part(self, part: Any, place: str) -> dict[str, Any]:
        """Return the part of a content with images."""
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            self._ignored.add_others(part, _IMAGE, place, never)
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else None
            if not isinstance(image, Mapping) or not isinstance(url, str):
                raise invalid(f"{place}.image_url.url", f"{place}.image_url.url must be a data URL")
            self._ignored.add_others(image, ("url",), f"{place}.image_url", never)
            return {"type": "image_url", "image_url": {"url": url}}
        message = self.read({"role": "user", "content": [part]}, place)
        return {"type": "text", "text": message["content"]}

    def _assistant(self, message: Message, place: str) -> Message:
        reasoning = message.pop("reasoning", None)
        if reasoning and not message.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        message.setdefault("content", None)
        calls = message.pop("tool_calls", None)
        if calls and not isinstance(calls, list):
            raise _invalid_message(f"{place}.tool_calls", f"{place}.tool_calls must be a list")
        if calls:
            message["tool_calls"] = [
                self._call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)
            ]
        return message

    def _call(self, call: Any, place: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _invalid_message(place, f"{place} is not a function call with a name")
        if call.get("type") not in (None, "function"):
            problem = f"{place}.type is {call['type']!r}; it must be function"
            raise _invalid_message(f"{place}.type", problem)
        if call.keys() - _CALL or function.keys() - _FUNCTION:
            self._ignored.add_others(call, _CALL, place, self._refuses)
            self._ignored.add_others(function, _FUNCTION, f"{place}.function", self._refuses)
        arguments = function.get("arguments")
        return {
            "id": str(call.get("id") or ""),
            "type": "function",
            "function": {
                "name": function["name"],
                "arguments": "{}" if arguments in (None, "") else arguments,
            },
        }


def check_arguments(messages: Sequence[Message]) -> None:
    """Raise `ApiError` if the arguments of a call in `messages` are a text that is nested too deep.
    Most chat templates could not render it. `messages` are the new messages of the request:
    messages of earlier turns need no second check.
    """
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and too_deep_text(arguments):
            problem = f"messages: the arguments of the call {call['id']!r} are nested too deep"
            raise _invalid_message("messages", problem)


def _invalid_message(place: str, problem: str) -> ApiError:
    return refused(place, problem, code="invalid_messages")


# --- the form in which messages are compared ------------------------------------------------------


class Echo:
    """A digest of each prefix of a conversation.

    Two digests are the same if the messages differ only in what a client library may change.
    `schemas` give the defaults of arguments: a call without an argument is the same call as one
    with the argument's default.
    """

    def __init__(self, digest: Digest = START, schemas: Schemas | None = None) -> None:
        self.digest = digest
        self._schemas = schemas or {}
        self._ids: dict[str, str] = {}
        self._calls = 0

    def add(self, message: Message) -> Digest:
        """Add the next message. Return the digest of all messages so far."""
        form = json_form(self._form(message))
        self.digest = blake2b(self.digest + form, digest_size=16).digest()
        return self.digest

    def _form(self, message: Message) -> list[Any]:
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            calls = []
            for call in message.get("tool_calls") or ():
                self._ids[str(call.get("id") or "")] = str(self._calls)
                self._calls += 1
                calls.append(call_form(call, self._schemas))
            return [role, content.strip(), calls]
        if role == "tool":
            call_id = str(message.get("tool_call_id") or "")
            return [role, content, self._ids.get(call_id, "?" + call_id)]
        return [role, content, message.get("name")]


def digests_of(messages: Sequence[Message], schemas: Schemas) -> list[Digest]:
    """Return the digest of each prefix of `messages`, the shortest first."""
    echo = Echo(schemas=schemas)
    return [echo.add(message) for message in messages]


def opening(messages: Sequence[Message]) -> str:
    """Return the digest of the messages before the first one of the assistant, in hex."""
    echo = Echo()
    for message in takewhile(lambda message: message["role"] != "assistant", messages):
        echo.add(message)
    return echo.digest.hex()


def call_form(call: Mapping[str, Any], schemas: Schemas) -> list[Any]:
    """Return the name and the arguments of `call` in the form in which calls are compared."""
    name = call["function"]["name"]
    # `_call` reads a call without arguments as "{}".
    arguments = canonical(call["function"].get("arguments") or "{}")
    return [name, _without_defaults(arguments, schemas.get(name))]


def _without_defaults(
    value: Any, schema: Schema | None, within: frozenset[bytes] = frozenset()
) -> Any:
    """Return `value` without the fields that equal their default in `schema`, at any depth.
    `within`: the defaults that contain `value`. If a default contains itself, it is not compared
    again.
    """
    if schema is None:
        return value
    if isinstance(value, list):
        items = enumerate(value)
        return [_without_defaults(item, schema.item(index), within) for index, item in items]
    if not isinstance(value, dict):
        return value
    changed = {}
    for name, item in value.items():
        field = schema.member(name)
        stripped = _without_defaults(item, field, within)
        for default in map(_same_numbers, field.default if field is not None else ()):
            form = json_form(default)
            if form not in within and json_form(stripped) == json_form(
                _without_defaults(default, field, within | {form})
            ):
                break
        else:
            changed[name] = stripped
    return changed


def json_form(value: Any) -> bytes:
    """Return `value` as JSON text that does not depend on the order of keys."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def canonical(arguments: Any) -> Any:
    """Return `arguments` as data for a comparison that ignores spacing, the order of keys and the
    notation of numbers. If `arguments` is a text that is not JSON or is nested too deep, return it
    unchanged.
    """
    data = arguments
    if isinstance(arguments, str):
        try:
            data = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return arguments
        if len(arguments) > 2 * DEEPEST and too_deep(data):  # a level has two brackets
            return arguments
    return _same_numbers(data)


def _same_numbers(value: Any) -> Any:
    """Return `value` with its numbers as JavaScript would send them back. JavaScript writes 1.0 as
    1, and its integers have at most 53 bits.
    """
    if isinstance(value, dict):
        return {
            key: item if isinstance(item, str) else _same_numbers(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_same_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, int) and abs(value) >= 2**53:
        return float(value)
    return value


def same_reasoning(message: Message, original: Message) -> bool:
    """Return True if the client's `message` repeats the reasoning of `original`, or has none."""
    echo = message.get("reasoning_content")
    return not echo or str(echo).strip() == str(original.get("reasoning_content") or "").strip()


def with_served_ids(
    new: Sequence[Message], echoed: Sequence[Message], history: Sequence[Message]
) -> list[Message]:
    """Return the `new` messages. If a tool result has a call id that the client made up, replace
    this id with the id that the endpoint gave to the call.

    `echoed` is the start of the conversation as the client repeats it. `history` is the same start
    with the endpoint's own ids.
    """
    answered = {m["tool_call_id"] for m in new if m.get("tool_call_id") is not None}
    ids: dict[str, str] = {}
    # In reverse: the last call with an id counts, and it is usually in the last message.
    for echo, served in zip(reversed(echoed), reversed(history), strict=True):
        if not answered:
            break
        for call, served_call in zip(
            reversed(echo.get("tool_calls") or ()),
            reversed(served.get("tool_calls") or ()),
            strict=True,
        ):
            if call["id"] in answered:
                answered.discard(call["id"])
                ids[call["id"]] = served_call["id"]
    # A message whose id does not change stays the same object, so that the session stores it once.
    changed = {given_id: own_id for given_id, own_id in ids.items() if given_id != own_id}
    return [
        {**m, "tool_call_id": changed[m["tool_call_id"]]} if m.get("tool_call_id") in changed else m
        for m in new
    ]


# --- how a request differs from what was served ---------------------------------------------------


def common_length(history: Sequence[Message], messages: Sequence[Message], schemas: Schemas) -> int:
    """Return the number of messages at the start of `history` that `messages` repeat."""
    ours, theirs = Echo(schemas=schemas), Echo(schemas=schemas)
    for index, (before, after) in enumerate(zip(history, messages, strict=False)):
        if ours.add(before) != theirs.add(after) or not same_reasoning(after, before):
            return index
    return min(len(history), len(messages))


def change_at(
    index: int, history: Sequence[Message], messages: Sequence[Message], schemas: Schemas
) -> str:
    """Say what happened to message `index`, the first one that `messages` do not repeat."""
    before, after = history[index], messages[index]
    place = f"message {index} ({before['role']}) of the served history"
    if index == len(history) - 2 and _has([history[-1]], after, schemas):
        return f"{place} is missing{LAST_OF_PROMPT}"
    if _has(messages[index + 1 :], before, schemas):
        return f"message {index} ({after['role']}) was inserted before {place}"
    if before["role"] != after["role"] or _has(history[index + 1 :], after, schemas):
        return f"{place} is missing"
    return f"{place} was changed: {_change(before, after, schemas)}"


def fork_advice(forks: Sequence[str]) -> str | None:
    """Return how the client can avoid several of the session's `forks`, which are reasons. Return
    None if no pattern is known.
    """
    dropped = sum(reason.endswith(LAST_OF_PROMPT) for reason in forks)
    if dropped < 2:
        return None
    return (
        f"{dropped} of {len(forks)} forks drop the last message of the prompt: use the Responses "
        "API if the client has it, or keep this message in later requests"
    )


def _has(messages: Sequence[Message], target: Message, schemas: Schemas) -> bool:
    digest = Echo(schemas=schemas).add(target)
    return any(Echo(schemas=schemas).add(message) == digest for message in messages)


def _change(before: Message, after: Message, schemas: Schemas) -> str:
    """Name the part of the message that differs."""
    ours, theirs = (str(message.get("content") or "").strip() for message in (before, after))
    if ours != theirs:
        return "its text"
    if _calls(before, schemas) != _calls(after, schemas):
        return "its calls"
    if not same_reasoning(after, before):
        return "its reasoning"
    return "its tool_call_id" if before["role"] == "tool" else "its name"


def _calls(message: Message, schemas: Schemas) -> list[bytes]:
    return [json_form(call_form(call, schemas)) for call in message.get("tool_calls") or ()]
