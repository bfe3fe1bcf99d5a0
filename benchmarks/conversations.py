"""Conversations to play with Qwen's real BPE: tau-bench's recorded ones if available, else invented
ones of the same size; tools: tau-bench's if it is installed, else a synthetic set of the same size.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.qwen import all_templates, qwen3_tokenizer

from toolroll.agents.environments.tau_bench.package import installed, load_domain
from toolroll.rollout.types import Message, Tool

QWEN = "qwen3_instruct_2507"
SYNTHETIC = """\
book_reservation user_id origin destination flight_type=one_way|round_trip \
cabin=basic_economy|economy|business flights[flight_number,date] \
passengers[first_name,last_name,dob] payment_methods[payment_id,amount:number] \
total_baggages:integer nonfree_baggages:integer insurance=yes|no
calculate expression
cancel_reservation reservation_id
get_reservation_details reservation_id
get_user_details user_id
list_all_airports
search_direct_flight origin destination date
search_onestop_flight origin destination date
send_certificate user_id amount:number
think thought
transfer_to_human_agents summary
update_reservation_baggages reservation_id total_baggages:integer nonfree_baggages:integer \
payment_id
update_reservation_flights reservation_id cabin=basic_economy|economy|business \
flights[flight_number,date] payment_id
update_reservation_passengers reservation_id passengers[first_name,last_name,dob]
"""
"""The names and parameters of the synthetic tools, one tool a line: those of tau-bench's airline
domain, so that recorded calls are valid. `name=a|b` is an enum, `name[a,b]` a list of objects,
`name:type` another type than a string.
"""


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
    """The conversations to play, and their tools. `source` describes their origin."""

    conversations: list[Conversation]
    tools: list[Tool]
    source: str


def tokenizer(template: str = QWEN) -> Any:
    """Return Qwen's tokenizer with one of the chat templates of trl or `TOOLROLL_TEST_DATA`."""
    sources = all_templates()
    return qwen3_tokenizer(sources.get(template) or sources[f"data/{template}"])


@cache
def workload(turns: int = 31) -> Workload:
    """Return conversations with exactly `turns` turns. Shorter ones continue with the exchanges of
    the next one.
    """
    domain = load_domain("tau_bench", "airline", "test") if package_installed() else None
    tools = [dict(tool) for tool in domain.tools_info] if domain else synthetic_tools()
    folder = os.environ.get("TOOLROLL_TEST_DATA")
    recorded = Path(folder, "tau_bench", "gpt-4o-airline-40.json") if folder else None
    if recorded is not None and recorded.is_file():
        conversations = [split(run["traj"]) for run in json.loads(recorded.read_text())]
        source = f"{len(conversations)} recorded gpt-4o runs of tau-bench's airline domain"
    else:
        system = domain.wiki if domain else None
        conversations = [invented(seed, tools, system) for seed in range(20)]
        source = f"{len(conversations)} invented conversations of the size of tau-bench's"
    source += f", {len(tools)} tools " + ("of tau-bench" if domain else "of the same size")
    return Workload(lengthened(conversations, turns), tools, source)


def package_installed() -> bool:
    """Return True if tau-bench's airline domain is installed. It is only on GitHub."""
    return installed("tau_bench", "airline")


# --- recorded conversations -----------------------------------------------------------------------


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


def lengthened(conversations: Sequence[Conversation], turns: int) -> list[Conversation]:
    """Return the conversations with exactly `turns` turns each."""
    made = []
    for at, conversation in enumerate(conversations):
        sequence, following = list(conversation.turns), at
        while len(sequence) < turns:
            following = (following + 1) % len(conversations)
            sequence += conversations[following].turns
        made.append(Conversation(conversation.first, sequence[:turns]))
    return made


def other_digits(seed: int) -> Callable[[Any], Any]:
    """Return a function that exchanges the digits in all strings of its argument: text of the same
    shape that was not seen before.
    """
    digits = list("0123456789")
    random.Random(seed).shuffle(digits)
    table = str.maketrans("0123456789", "".join(digits))

    def other(part: Any) -> Any:
        if isinstance(part, str):
            return part.translate(table)
        if isinstance(part, dict):
            return {key: other(inner) for key, inner in part.items()}
        return [other(inner) for inner in part] if isinstance(part, list) else part

    return other


def renumbered(conversation: Conversation, seed: int) -> Conversation:
    """Return the conversation with other digits in all but its system message."""
    other = other_digits(seed)
    first = [
        message if message["role"] == "system" else other(message) for message in conversation.first
    ]
    turns = [Turn(other(turn.assistant), other(turn.new)) for turn in conversation.turns]
    return Conversation(first, turns)


# --- synthetic tools and conversations ------------------------------------------------------------

_WORDS = (
    "flight reservation booked change cancel insurance passenger economy business total payment "
    "card gift certificate bag origin destination date policy agent user please confirm details "
    "number available seat price refund within hours"
).split()


def synthetic_tools() -> list[Tool]:
    """Return the tools of `SYNTHETIC`, with descriptions as long as tau-bench's."""
    rng = random.Random(0)
    tools = []
    for line in SYNTHETIC.splitlines():
        name, *signature = line.split()
        function = {
            "name": name,
            "description": _words(rng, 11).capitalize() + ".",
            "parameters": _object(rng, signature),
        }
        tools.append({"type": "function", "function": function})
    return tools


def _object(rng: random.Random, signature: Sequence[str]) -> dict[str, Any]:
    properties = {re.split(r"[=\[:]", part)[0]: _property(rng, part) for part in signature}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _property(rng: random.Random, part: str) -> dict[str, Any]:
    if "[" in part:
        inner = _object(rng, part[part.index("[") + 1 : -1].split(","))
        return {"type": "array", "description": _words(rng, 10), "items": inner}
    if "=" in part:
        return {"type": "string", "enum": part.partition("=")[2].split("|")}
    example = f", such as '{_words(rng, 1)}_{rng.randrange(9999)}'."
    return {
        "type": part.partition(":")[2] or "string",
        "description": _words(rng, 9).capitalize() + example,
    }


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def _argument(rng: random.Random, schema: dict[str, Any]) -> Any:
    """Return a valid value of `schema`."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"]
    if kind == "object":
        return {name: _argument(rng, inner) for name, inner in schema["properties"].items()}
    if kind == "array":
        return [_argument(rng, schema["items"]) for _ in range(2)]
    return f"{_words(rng, 1)}_{rng.randrange(9999)}" if kind == "string" else rng.randrange(99)


def invented(seed: int, tools: Sequence[Tool], system: str | None) -> Conversation:
    """Return a conversation like tau-bench's: a long policy (`system` if given), short user lines,
    JSON from tools.
    """
    rng = random.Random(seed)

    def turns() -> Iterator[Turn]:
        for at in range(31):
            if rng.random() < 0.5:
                yield Turn(
                    {"role": "assistant", "content": _words(rng, 60)},
                    [{"role": "user", "content": _words(rng, 23)}],
                )
                continue
            function = rng.choice(tools)["function"]
            arguments = json.dumps(_argument(rng, function["parameters"]))
            call = {
                "id": f"call{at:05d}",
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
            fields = range(rng.randrange(3, 31))
            said = {"role": "tool", "tool_call_id": call["id"], "name": function["name"]}
            content = json.dumps(
                {
                    f"{rng.choice(_WORDS)}_{n}": f"{_words(rng, 3)} {rng.random():.4f}"
                    for n in fields
                }
            )
            yield Turn(
                {"role": "assistant", "content": "", "tool_calls": [call]},
                [{**said, "content": content}],
            )

    policy = system or _words(random.Random(0), 1265)
    first = [{"role": "system", "content": policy}, {"role": "user", "content": _words(rng, 20)}]
    return Conversation(first, list(turns()))


def as_sampled(message: Message) -> str:
    """Return the text that a model with the Hermes format would sample for an assistant message,
    without the stop token.
    """
    parts = [message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(
            f'<tool_call>\n{{"name": "{function["name"]}", "arguments": '
            f"{function['arguments']}}}\n</tool_call>"
        )
    return "\n".join(part for part in parts if part)
