"""Conversations to play with Qwen's real BPE: tau-bench's recorded ones if available, else invented
ones of the same shape.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.qwen import all_templates, qwen3_tokenizer

from toolroll.rollout.types import Message, Tool

QWEN = "qwen3_instruct_2507"


@dataclass(frozen=True)
class Turn:
    """One exchange: the model's turn, then the environment's messages."""

    assistant: Message
    new: list[Message]


@dataclass(frozen=True)
class Conversation:
    """The first messages, and the turns."""

    first: list[Message]
    turns: list[Turn]


@dataclass(frozen=True)
class Workload:
    """The conversations to play. `source` describes their origin. `recorded`: the original
    conversations, without exchanges from others.
    """

    conversations: list[Conversation]
    tools: list[Tool]
    source: str
    recorded: list[Conversation]


def tokenizer(template: str = QWEN) -> Any:
    """Return Qwen's tokenizer with one of its chat templates."""
    found = all_templates()
    name = template if template in found else f"data/{template}"
    return qwen3_tokenizer(found.get(name))


@cache
def workload(turns: int = 31) -> Workload:
    """Return conversations with at least `turns` turns. Shorter ones continue with the exchanges of
    the next one.
    """
    folder = os.environ.get("TOOLROLL_TEST_DATA")
    recorded = Path(folder, "tau_bench", "gpt-4o-airline-40.json") if folder else None
    if recorded is not None and recorded.is_file():
        runs = json.loads(recorded.read_text())
        given = [split(run["traj"]) for run in runs]
        tools, from_package = airline_tools(given)
        source = (
            f"{len(given)} recorded gpt-4o runs of tau-bench's airline domain, {len(tools)} tools"
        )
        source += "" if from_package else " (rebuilt from the calls: tau-bench is not installed)"
        return Workload(lengthened(given, turns), tools, source, given)
    given = [invented(seed) for seed in range(20)]
    return Workload(
        lengthened(given, turns),
        made_up_tools(),
        "20 made-up conversations of tau-bench's shape, 14 tools",
        given,
    )


def split(messages: Sequence[Message]) -> Conversation:
    """Return a recorded conversation, split before each assistant message."""
    clean = [_clean(message) for message in messages]
    begin = next(at for at, message in enumerate(clean) if message["role"] == "assistant")
    turns: list[Turn] = []
    for message in clean[begin:]:
        if message["role"] == "assistant":
            turns.append(Turn(message, []))
        else:
            turns[-1].new.append(message)
    return Conversation(clean[:begin], [turn for turn in turns if turn.new])


def _clean(message: Message) -> Message:
    kept = {
        key: message[key]
        for key in ("role", "content", "tool_calls", "tool_call_id", "name")
        if message.get(key) is not None
    }
    return {"content": "", **kept}


def lengthened(given: Sequence[Conversation], turns: int) -> list[Conversation]:
    """Return the conversations with exactly `turns` turns each."""
    made = []
    for at, conversation in enumerate(given):
        sequence, following = list(conversation.turns), at
        while len(sequence) < turns:
            following = (following + 1) % len(given)
            sequence += given[following].turns
        made.append(Conversation(conversation.first, sequence[:turns]))
    return made


def renumbered(given: Conversation, seed: int) -> Conversation:
    """Return the conversation with other digits in all but its system message: text of the same
    shape that was not seen before."""
    digits = list("0123456789")
    random.Random(seed).shuffle(digits)
    table = str.maketrans("0123456789", "".join(digits))

    def other(value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(table)
        if isinstance(value, dict):
            return {key: other(item) for key, item in value.items()}
        return [other(item) for item in value] if isinstance(value, list) else value

    turns = [Turn(other(turn.assistant), other(turn.new)) for turn in given.turns]
    first = [message if message["role"] == "system" else other(message) for message in given.first]
    return Conversation(first, turns)


def airline_tools(given: Sequence[Conversation]) -> tuple[list[Tool], bool]:
    """Return tau-bench's tools and True, or tools rebuilt from the recorded calls and False."""
    from toolroll.agents.environments.tau_bench.package import installed, load_domain

    if installed("tau_bench", "airline"):
        return [dict(tool) for tool in load_domain("tau_bench", "airline", "test").tools_info], True
    seen: dict[str, set[str]] = {}
    for conversation in given:
        for turn in conversation.turns:
            for call in turn.assistant.get("tool_calls") or ():
                names = json.loads(call["function"]["arguments"])
                seen.setdefault(call["function"]["name"], set()).update(names)
    return [_tool(name, sorted(arguments)) for name, arguments in sorted(seen.items())], False


def _tool(name: str, arguments: Sequence[str]) -> Tool:
    words = name.replace("_", " ")
    properties = {
        each: {"type": "string", "description": f"The {each.replace('_', ' ')}, as in the example."}
        for each in arguments
    }
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {words}.", "parameters": parameters},
    }


def made_up_tools() -> list[Tool]:
    """Return fourteen tools with four arguments each."""
    return [
        _tool(f"do_thing_{at}", ["user_id", "item", "date_of_flight", "reason"]) for at in range(14)
    ]


_WORDS = (
    "flight reservation booked change cancel insurance passenger economy business total payment "
    "card gift certificate bag "
    "origin destination date policy agent user please confirm details number available seat price "
    "refund within hours"
).split()


def invented(seed: int) -> Conversation:
    """Return a conversation like tau-bench's: a long policy, short user lines, JSON from tools."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(count))

    def turns() -> Iterator[Turn]:
        for at in range(31):
            if rng.random() < 0.5:
                arguments = json.dumps(
                    {"user_id": f"user_{rng.randrange(9999)}", "item": words(2), "reason": words(4)}
                )
                call = {
                    "id": f"call{at:05d}",
                    "type": "function",
                    "function": {"name": "do_thing_3", "arguments": arguments},
                }
                body = json.dumps(
                    {f"{rng.choice(_WORDS)}_{n}": words(3) for n in range(rng.randrange(5, 20))}
                )
                answer: Message = {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": "do_thing_3",
                    "content": body,
                }
                yield Turn({"role": "assistant", "content": "", "tool_calls": [call]}, [answer])
            else:
                yield Turn(
                    {"role": "assistant", "content": words(60)},
                    [{"role": "user", "content": words(25)}],
                )

    return Conversation(
        [{"role": "system", "content": words(1000)}, {"role": "user", "content": words(20)}],
        list(turns()),
    )


def as_sampled(turn: Message) -> str:
    """Return the text that a model with the Hermes format would sample for an assistant message,
    without the stop token.
    """
    parts = [turn.get("content") or ""]
    for call in turn.get("tool_calls") or ():
        function = call["function"]
        parts.append(
            f'<tool_call>\n{{"name": "{function["name"]}", "arguments": '
            f"{function['arguments']}}}\n</tool_call>"
        )
    return "\n".join(part for part in parts if part)
