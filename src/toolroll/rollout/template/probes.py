"""The probe conversations of `certify`: small examples of what can happen in a tool-calling
episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolroll.rollout.types import Message, Tool


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation, and the messages to append to it.

    The last of `messages` is the assistant turn, which is treated as sampled. `what` describes the
    probe in reports. `tools` are the tools of the conversation. `cut`: the turn was truncated by
    its length, so it has no stop token.
    """

    name: str
    what: str
    messages: tuple[Message, ...]
    new: tuple[Message, ...]
    tools: Sequence[Tool] | None = field(default_factory=lambda: TOOLS)
    cut: bool = False


CONTROL = "\0control\0"
"""Placeholder in a probe for the text of one of the template's control tokens."""

HALF = "It is half"
"""The complete text of a truncated turn."""


def _tool(name: str, properties: Mapping[str, Any]) -> Tool:
    parameters = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {name}.", "parameters": parameters},
    }


OTHER = _tool("list_all", {})
TOOLS: list[Tool] = [_tool("look", {"key": {"type": "string"}}), OTHER]
USER: list[Message] = [{"role": "user", "content": "What is x?"}]
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
BASE = (_SYSTEM, *USER)
_THOUGHT: dict[str, Any] = {"reasoning_content": "I had better look."}
_ANSWER: Message = {"role": "assistant", "content": "It is 1."}
_AGAIN: Message = {"role": "user", "content": "And y?"}


def _calling(*keys: str, first: int = 0, **more: Any) -> Message:
    """Return an assistant turn that calls `look` once for each of `keys`. Without keys, the turn
    calls `list_all`, which takes no arguments.

    The ids of the calls are numbered from `first`. `more`: other fields of the message.
    """
    calls: list[tuple[str, dict[str, Any]]] = [("look", {"key": key}) for key in keys] or [
        ("list_all", {})
    ]
    listed = [
        {
            "id": f"callid{pos:03d}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for pos, (name, arguments) in enumerate(calls, first)
    ]
    return {"role": "assistant", "content": "", **more, "tool_calls": listed}


def _result(text: str, index: int = 0, name: str = "look") -> Message:
    return {"role": "tool", "tool_call_id": f"callid{index:03d}", "name": name, "content": text}


AFTER_A_CALL: list[Message] = [*USER, _calling("x"), _result("1")]
_CALL = (*BASE, _calling("x"))
_CYCLES = tuple(
    message for number in (0, 1) for message in (_calling("x", first=number), _result("1", number))
)
_BATTERY = (
    Probe("tool", "a tool result", _CALL, (_result('{"x": 1}'),)),
    Probe("tool_empty", "an empty tool result", _CALL, (_result(""),)),
    Probe(
        "tool_control_text",
        "a tool result with the text of a control token",
        _CALL,
        (_result(f"see {CONTROL} there"),),
    ),
    Probe(
        "no_arguments",
        "a result of a call without arguments",
        (*BASE, _calling()),
        (_result("[]", name="list_all"),),
    ),
    Probe(
        "parallel",
        "two results of two calls",
        (*BASE, _calling("x", "y")),
        (_result("1"), _result("2", 1)),
    ),
    Probe(
        "cycles",
        "a tool result after two earlier ones",
        (*BASE, *_CYCLES, _calling("z", first=2)),
        (_result("3", 2),),
    ),
    Probe("user", "a user message after an answer", (*BASE, _ANSWER), (_AGAIN,)),
    Probe(
        "user_after_tools",
        "a user message after tools and an answer",
        (*BASE, *_CYCLES, _ANSWER),
        (_AGAIN,),
    ),
    Probe("no_system", "a tool result without a system message", _CALL[1:], (_result("1"),)),
    Probe("no_tools", "a user message without any tools", (*BASE, _ANSWER), (_AGAIN,), tools=None),
    Probe(
        "thought_tool",
        "a tool result after a thought and a call",
        (*BASE, _calling("x", **_THOUGHT)),
        (_result("1"),),
    ),
    Probe(
        "thought_text_tool",
        "a tool result after a thought, a text and a call",
        (*BASE, _calling("x", content="I look.", **_THOUGHT)),
        (_result("1"),),
    ),
    Probe(
        "thought_user",
        "a user message after a thought and an answer",
        (*BASE, {**_ANSWER, **_THOUGHT}),
        (_AGAIN,),
    ),
    Probe(
        "thought_only",
        "a user message after a turn without an answer after its thought",
        (*BASE, {**_ANSWER, "content": "", **_THOUGHT}),
        (_AGAIN,),
    ),
    Probe(
        "cut",
        "a user message after an answer cut by length",
        (*BASE, {**_ANSWER, "content": HALF}),
        (_AGAIN,),
        cut=True,
    ),
)


def probes(*, opens_reasoning: bool) -> list[Probe]:
    """Return the probes. If `opens_reasoning` is True, the generation prompt opens the reasoning.
    Every assistant turn then has reasoning, and probes with a truncated turn are left out.
    """
    if not opens_reasoning:
        return list(_BATTERY)
    return [
        replace(probe, messages=tuple(map(_thinking, probe.messages)))
        for probe in _BATTERY
        if not probe.cut
    ]


BODIES = (
    '{"x": 1}',
    "",
    "one line\n\nand  another\t",
    "Zürich 東京 3.14 🙂",
    "[]",
    "  edged  ",
    "<b>&'\"</b> {{ x }}",
    "Error: it's 12:30",
    f"see {CONTROL} there",
)
"""Different kinds of tool results."""


def calls_in_a_row(count: int, *, thinks: bool) -> Iterator[tuple[Message, Message]]:
    """Yield `count` assistant turns, each with one call, and the result of each call. Names,
    arguments, ids and texts differ from turn to turn.
    """
    names = ("look", "list_all", "python")
    for number in range(count):
        turn = _calling(
            f"{'k' * (number % 5)}{number}", first=number, **(_THOUGHT if thinks else {})
        )
        turn["tool_calls"][0]["function"]["name"] = names[number % len(names)]
        yield turn, _result(BODIES[number % len(BODIES)], number, names[number % len(names)])


def episode(user_messages: int, *, thinks: bool) -> list[Message]:
    """Return a conversation in which each user message is answered after two calls."""
    messages: list[Message] = list(BASE[:1])
    for number in range(0, 2 * user_messages, 2):
        messages += [_AGAIN, *_CYCLES, _ANSWER] if number else [*USER, *_CYCLES, _ANSWER]
    return list(map(_thinking, messages)) if thinks else messages


def _thinking(message: Message) -> Message:
    return {**message, **_THOUGHT} if message["role"] == "assistant" else message


def with_control(messages: tuple[Message, ...], control: str) -> tuple[Message, ...]:
    """Return `messages` with `CONTROL` replaced by `control`, the text of a control token."""
    return tuple(
        {**message, "content": message["content"].replace(CONTROL, control)} for message in messages
    )
