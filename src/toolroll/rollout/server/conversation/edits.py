"""Say how a request differs from a conversation that was served, for the `fork_reason`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.rollout.server.conversation.messages import (
    Echo,
    call_form,
    json_form,
    same_reasoning,
)
from toolroll.rollout.server.requests.tool_list import Schemas
from toolroll.rollout.types import Message

_EXCERPT = 40
"""The number of characters that an excerpt of a text has on each side of the first difference."""


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
    if _has(messages[index + 1 :], before, schemas):
        return f"message {index} ({after['role']}) was inserted before {place}"
    if before["role"] != after["role"] or _has(history[index + 1 :], after, schemas):
        return f"{place} is missing"
    return f"{place} was changed: {_change(before, after, schemas)}"


def _has(messages: Sequence[Message], wanted: Message, schemas: Schemas) -> bool:
    digest = Echo(schemas=schemas).add(wanted)
    return any(Echo(schemas=schemas).add(message) == digest for message in messages)


def _change(before: Message, after: Message, schemas: Schemas) -> str:
    ours, theirs = (str(message.get("content") or "").strip() for message in (before, after))
    if ours != theirs:
        return f"its text {_excerpts(ours, theirs)}"
    calls, others = before.get("tool_calls") or (), after.get("tool_calls") or ()
    names, other_names = ([call["function"]["name"] for call in each] for each in (calls, others))
    if names != other_names:
        return f"its calls {_short(names)} became {_short(other_names)}"
    for call, other in zip(calls, others, strict=True):
        name, ours = call_form(call, schemas)
        _, theirs = call_form(other, schemas)
        if json_form(ours) != json_form(theirs):
            return f"{_argument(ours, theirs)} of its call {_short(name)}"
    if not same_reasoning(after, before):
        return "its reasoning"
    return "its tool_call_id" if before["role"] == "tool" else "its name"


def _argument(before: Any, after: Any) -> str:
    """Name the first argument that differs."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return "the arguments"
    name = next(name for name in {**before, **after} if _differ(name, before, after))
    if name not in after:
        return f"the argument {_short(name)} was removed from the arguments"
    if name not in before:
        return f"the argument {_short(name)} was added to the arguments"
    return f"the argument {_short(name)}"


def _differ(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    if name not in before or name not in after:
        return True
    return json_form(before[name]) != json_form(after[name])


def _excerpts(before: str, after: str) -> str:
    pairs = enumerate(zip(before, after, strict=False))
    end = min(len(before), len(after))
    start = max(0, next((index for index, (a, b) in pairs if a != b), end) - _EXCERPT)
    return " became ".join(
        repr(f"{'...' if start else ''}{text[start : start + 2 * _EXCERPT]}")
        + ("..." if len(text) > start + 2 * _EXCERPT else "")
        for text in (before, after)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 2 * _EXCERPT else f"{text[: 2 * _EXCERPT]}..."
