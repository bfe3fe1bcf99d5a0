"""Prompt building: CPU per turn, from a sampled turn and new messages to the next request's ids.

A whole turn is timed; for toolroll this includes decoding and storing the sampled ids. No
conversation is played twice: digits differ between rounds, so that a cache helps only with text
that repeats in a real run (the system prompt, the texts of tools). One row of toolroll starts each
conversation with empty caches.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.clock import Laps, mean
from benchmarks.conversations import (
    QWEN,
    Conversation,
    Workload,
    as_sampled,
    renumbered,
    tokenizer,
    workload,
)
from benchmarks.peers import (
    FullRender,
    PublishedLoop,
    Renderers,
    Strands,
    Verl,
    Way,
    missing,
    readable,
)
from benchmarks.tables import Table, number
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.chat_template import HistoryPolicy
from toolroll.rollout.template.verify import ServedSequence, TurnSpan
from toolroll.rollout.types import Completion, Message, Tool

TURNS = (1, 5, 10, 20, 30)
FLOOR = "floor: raw encode of the new bodies"


class Toolroll:
    """toolroll: template, session, and the ids of the next request as JSON.

    `forget`: start each conversation with empty caches.
    """

    def __init__(
        self,
        tok: Any,
        name: str = "toolroll",
        *,
        forget: bool = False,
        history: HistoryPolicy = "fork",
    ) -> None:
        self.name = name
        self._make = lambda: ChatTemplate(tok, history=history)
        self.template = self._make()
        self._forget = forget

    def prepare(self) -> None:
        """Clear the caches if `forget` is set. Not timed."""
        if self._forget:
            self.template = self._make()

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        self._session, self._turns, self.preserved = SessionPath(Session("s")), list[TurnSpan](), 0
        self._messages, self._tools = list(messages), tools
        self._cursor = self.template.start(messages, tools)
        self._session.observe(self._cursor.prompt())
        return self._session.input_ids  # type: ignore[return-value]

    def sampled(self, ids: list[int]) -> None:
        """Store and decode the sampled ids."""
        array = np.array(ids, dtype=np.int32)
        said = Completion(array, np.zeros(len(ids), dtype=np.float32), "stop")
        node = self._session.sample(said, {})
        self._turns.append(TurnSpan(node.start, node.stop, len(self._messages)))
        self._sampled = self.template.sampled(ids)

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        self._messages.append(assistant)
        ids, self._cursor = self._cursor.after(self._sampled, [assistant, *new])
        self.preserved += self._cursor.preserved is not None
        self._session.observe(ids)
        self._messages += new
        return self._session.input_ids, self._session.input_ids_json  # type: ignore[return-value]

    def verify(self) -> None:
        """Check the whole conversation, as verify="sample" does when an episode ends."""
        last = self._turns[-1].message + 1
        sequence = ServedSequence(
            self._session.input_ids,
            tuple(self._turns),
            self._messages[:last],
            self._tools,
            preserved=self.preserved > 0,
        )
        found = self.template.verifier.check(sequence)
        if found is not None:
            raise RuntimeError(f"{self.name}: {found}")

    @property
    def prompt(self) -> list[int]:
        """The next request's ids."""
        return [int(index) for index in self._session.input_ids]


def ways(tok: Any) -> tuple[list[Way], list[str]]:
    """Return our ways and those of the peers that are installed, and why the others are skipped."""
    found: list[Way] = [
        FullRender(tok),
        PublishedLoop(tok),
        Toolroll(tok),
        Toolroll(tok, "toolroll, empty caches", forget=True),
    ]
    peers: list[tuple[str, str, Callable[[], Way]]] = [
        ("renderers 0.1.12", "renderers", lambda: Renderers(tok)),
        ("strands-sglang 0.4.3", "strands_sglang", lambda: Strands(tok)),
        ("verl 0.9.1", "verl", lambda: Verl(tok, with_tools=True)),
        ("verl 0.9.1", "verl", lambda: Verl(tok, with_tools=False)),
    ]
    skipped = []
    for package, module, make in peers:
        why = missing(package, module)
        if why is None:
            found.append(make())
        elif why not in skipped:
            skipped.append(why)
    return found, skipped


@dataclass
class Measured:
    """Laps by (way, "first"), (way, "verify") and (way, conversation, turn); prompt lengths."""

    names: list[str]
    laps: Laps
    prompts: Laps
    equal: dict[str, list[bool]]
    conversations: int
    skipped: list[str]

    def of_turn(self, name: str, turn: int) -> float:
        """Return the microseconds of one turn: the mean over conversations."""
        return mean(self.laps.median((name, at, turn)) for at in range(self.conversations))

    def of_turns(self, name: str) -> float:
        """Return the microseconds of all turns of a conversation."""
        return sum(self.of_turn(name, turn) for turn in range(1, TURNS[-1] + 1))


def measure(load: Workload, *, conversations: int, rounds: int) -> Measured:
    """Play every conversation in every way, interleaved, after one round that is not timed."""
    tok = tokenizer(QWEN)
    candidates, skipped = ways(tok)
    names = [FLOOR, *(way.name for way in candidates)]
    found = Measured(names, Laps(), Laps(), {name: [] for name in names}, conversations, skipped)
    for number_of_round in range(rounds + 1):
        gc.collect()
        laps = found.laps if number_of_round else Laps()
        for at, given in enumerate(load.conversations[:conversations]):
            conversation = renumbered(given, number_of_round)
            turned = at % len(candidates)
            for way in candidates[turned:] + candidates[:turned]:
                equal = play(way, tok, conversation, load.tools, at, laps, found.prompts)
                found.equal[way.name] += equal if number_of_round == 1 else []
            floor(tok, conversation, at, laps)
    return found


def play(
    way: Way,
    tok: Any,
    conversation: Conversation,
    tools: list[Tool],
    at: int,
    laps: Laps,
    prompts: Laps,
) -> list[bool]:
    """Play one conversation; return whether the text of each prompt equals the full render."""
    end = tok.convert_tokens_to_ids("<|im_end|>")
    history = list(conversation.first)
    if isinstance(way, Toolroll):
        way.prepare()
    with laps.lap((way.name, "first")):
        way.begin(list(conversation.first), tools)
    equal = []
    for number_of_turn, turn in enumerate(conversation.turns[: TURNS[-1]], 1):
        ids = [*tok.encode(as_sampled(turn.assistant), add_special_tokens=False), end]
        assistant = readable(turn.assistant)
        with laps.lap((way.name, at, number_of_turn)):
            if isinstance(way, Toolroll):
                way.sampled(ids)
            prompt = way.turn(assistant, ids, turn.new)
        history += [assistant, *turn.new]
        if number_of_turn in TURNS and not isinstance(way, PublishedLoop):
            built = way.prompt if isinstance(way, Toolroll) else list(prompt)
            shown: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
            text = tok.apply_chat_template(history, tools=tools, **shown)
            equal.append(tok.decode(built) == text)
            if isinstance(way, FullRender):
                prompts.add(number_of_turn, float(len(built)))
    if isinstance(way, Toolroll):
        with laps.lap((way.name, "verify")):
            way.verify()
    return equal


def floor(tok: Any, conversation: Conversation, at: int, laps: Laps) -> None:
    """Time the minimum work of any way: encode the new bodies with the bare tokenizer."""
    encode = tok.backend_tokenizer.encode
    for number_of_turn, turn in enumerate(conversation.turns[: TURNS[-1]], 1):
        bodies = [message["content"] for message in turn.new]
        began = time.thread_time_ns()
        for body in bodies:
            _ = encode(body, add_special_tokens=False).ids
        laps.add((FLOOR, at, number_of_turn), (time.thread_time_ns() - began) / 1000)


def table(found: Measured, load: Workload) -> Table:
    """Tabulate."""
    made = Table(
        "Prompt building, microseconds of CPU",
        [
            "way",
            "first prompt",
            *(f"turn {turn}" for turn in TURNS),
            "conversation of 30 turns",
            "over the floor",
            "verification at the end",
            "prompts as rendered",
        ],
    )
    least = found.of_turns(FLOOR)
    for name in found.names:
        first = found.laps.median((name, "first")) if name != FLOOR else 0.0
        checked = (name, "verify") in found.laps.times
        equal = found.equal[name]
        made.rows.append(
            [
                name,
                number(first) if first else "",
                *(number(found.of_turn(name, turn)) for turn in TURNS),
                number(first + found.of_turns(name)),
                f"{found.of_turns(name) / least:.2f}",
                number(found.laps.median((name, "verify"))) if checked else "",
                f"{sum(equal)}/{len(equal)}" if equal else "" if name == FLOOR else "text",
            ]
        )
    tokens = ", ".join(f"{mean(found.prompts.times[turn]):,.0f}" for turn in TURNS)
    made.notes += [
        f"{load.source}; Qwen's BPE, template {QWEN}; prompt tokens at these turns: {tokens}.",
        "Over the floor: the 30 turns without the first prompt.",
        *(f"Skipped: {why}." for why in found.skipped),
    ]
    return made


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    load = workload()
    return table(measure(load, conversations=4 if quick else 12, rounds=3), load)
