"""Prompt building: CPU per turn, from a sampled turn and new messages to the next request's ids.

A whole turn is timed; for toolroll this includes decoding and storing the sampled ids. Digits
differ in each conversation, so that a cache helps only with text that repeats in a real run (the
system prompt, the tools, texts without digits). One row of toolroll starts each conversation with
empty caches.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import tight
from benchmarks.clock import Laps
from benchmarks.conversations import (
    QWEN,
    Conversation,
    as_sampled,
    other_digits,
    renumbered,
    tokenizer,
    workload,
)
from benchmarks.conversations import Turn as Exchange
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
from benchmarks.tables import Required, Table, number
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.chat_template import HistoryPolicy
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.types import Completion, Message, Tool

PROMPTS, TURNS = 30, 100
EARLY, LATE = range(3, 8), range(TURNS - 4, TURNS + 1)
"""Turns 5 and 100, each with its neighbors, which have the same text up to digits."""
RAW, FULL, OURS = "raw encode of the new bodies", FullRender.name, "toolroll"


class Toolroll:
    """toolroll: template, session, and the ids of the next request as JSON.

    `forget`: start each conversation with empty caches.
    """

    def __init__(
        self,
        tok: Any,
        name: str = OURS,
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

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        ids = np.array(sampled_ids, dtype=np.int32)
        said = Completion(ids, np.zeros(len(ids), dtype=np.float32), "stop")
        node = self._session.sample(said, {})
        self._turns.append(TurnSpan(node.start, node.stop, len(self._messages)))
        sampled = self.template.sampled(sampled_ids)
        self._messages.append(assistant)
        delta, self._cursor = self._cursor.after(sampled, [assistant, *new])
        self.preserved += self._cursor.preserved is not None
        self._session.observe(delta)
        self._messages += new
        _ = self._session.input_ids_json
        return self._session.input_ids  # type: ignore[return-value]

    def verify(self) -> None:
        """Check the whole conversation, as verify="sample" does when an episode ends."""
        sequence = ServedSequence(
            self._session.input_ids,
            tuple(self._turns),
            self._messages[: self._turns[-1].message + 1],
            self._tools,
            preserved=self.preserved > 0,
        )
        failure = self.template.verifier.check(sequence)
        if failure is not None:
            raise RuntimeError(f"{self.name}: {failure}")


class Tight:
    """The prompts of the tight loop."""

    name = "tight loop"

    def __init__(self, tok: Any) -> None:
        self._prompts = tight.Prompts(tok)
        self._episode = tight.Episode()

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        self._episode = tight.Episode()
        self._episode.append(self._prompts.first(messages, tools))
        return self._episode.ids

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        self._episode.append(sampled_ids, [0.0] * len(sampled_ids))
        for message in new:
            self._episode.append(self._prompts.new(message))
        return self._episode.ids


def ways(tok: Any) -> tuple[list[Way], list[str]]:
    """Return our ways and those of the peers that are installed, and why the others are skipped."""
    candidates: list[Way] = [
        Tight(tok),
        Toolroll(tok),
        Toolroll(tok, "toolroll, empty caches", forget=True),
        FullRender(tok),
        PublishedLoop(tok),
    ]
    peers: list[tuple[str, str, Callable[[], Way]]] = [
        ("strands-sglang 0.6.2", "strands_sglang", lambda: Strands(tok)),
        ("renderers 0.1.12", "renderers", lambda: Renderers(tok)),
        ("verl 0.9.1", "verl", lambda: Verl(tok, with_tools=True)),
        ("verl 0.9.1", "verl", lambda: Verl(tok, with_tools=False)),
    ]
    skipped: dict[str, None] = {}
    for package, module, make in peers:
        why = missing(package, module)
        if why is None:
            candidates.append(make())
        else:
            skipped[why] = None
    return candidates, list(skipped)


@dataclass
class Measured:
    """Laps by (way, "first"), (way, "verify") and (way, conversation, turn); whether the text of a
    prompt equals the full render, by way; the ids of the prompt at each turn in `PROMPTS, TURNS`.
    """

    names: list[str]
    conversations: int
    laps: Laps = field(default_factory=Laps)
    equal: dict[str, list[bool]] = field(default_factory=dict)
    lengths: dict[int, list[int]] = field(default_factory=lambda: {PROMPTS: [], TURNS: []})

    def of_turns(self, name: str, turns: Sequence[int]) -> float:
        """Return the microseconds of a turn in `turns`: the mean of medians over the rounds."""
        return statistics.fmean(
            self.laps.median((name, talk, turn))
            for talk in range(self.conversations)
            for turn in turns
        )

    def of_prompts(self, name: str) -> float:
        """Return the microseconds of the prompts after the first one, up to `PROMPTS` turns."""
        return PROMPTS * self.of_turns(name, range(1, PROMPTS + 1))


def with_late_turns(conversation: Conversation) -> Conversation:
    """Return the conversation with the turns `LATE` replaced by `EARLY` with other digits."""
    other = other_digits(-1)
    early = [conversation.turns[turn - 1] for turn in EARLY]
    late = [Exchange(other(turn.assistant), other(turn.new)) for turn in early]
    return Conversation(conversation.first, [*conversation.turns[: LATE[0] - 1], *late])


def measure(talks: Sequence[Conversation], tools: list[Tool], rounds: int) -> tuple[Measured, Any]:
    """Play every conversation in every way, interleaved, after one round that is not timed."""
    tok = tokenizer(QWEN)
    candidates, skipped = ways(tok)
    found = Measured([RAW, *(way.name for way in candidates)], len(talks))
    for number_of_round in range(rounds + 1):
        gc.collect()
        if number_of_round == 1:
            found.laps = Laps()
        for at, talk in enumerate(talks):
            conversation = renumbered(with_late_turns(talk), number_of_round * 1000 + at)
            shift = at % len(candidates)
            for way in candidates[shift:] + candidates[:shift]:
                compared = number_of_round == 1
                play(way, tok, conversation, tools, at, found, compared=compared)
            raw_encode(tok, conversation, at, found.laps, TURNS)
    return found, skipped


def play(
    way: Way,
    tok: Any,
    conversation: Conversation,
    tools: list[Tool],
    at: int,
    found: Measured,
    *,
    compared: bool,
) -> None:
    """Play one conversation. If `compared`, compare prompts with the full render."""
    end = tok.convert_tokens_to_ids("<|im_end|>")
    history = list(conversation.first)
    if isinstance(way, Toolroll):
        way.prepare()
    with found.laps.lap((way.name, "first")):
        way.begin(list(conversation.first), tools)
    for turn, exchange in enumerate(conversation.turns[:TURNS], 1):
        ids = [*tok.encode(as_sampled(exchange.assistant), add_special_tokens=False), end]
        assistant = readable(exchange.assistant)
        with found.laps.lap((way.name, at, turn)):
            prompt = way.turn(assistant, ids, exchange.new)
        history += [assistant, *exchange.new]
        if compared and turn in (5, PROMPTS, TURNS) and not isinstance(way, PublishedLoop):
            kwargs: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
            text = tok.apply_chat_template(history, tools=tools, **kwargs)
            found.equal.setdefault(way.name, []).append(tok.decode(list(prompt)) == text)
            if isinstance(way, FullRender) and turn in found.lengths:
                found.lengths[turn].append(len(prompt))
        if turn == PROMPTS and isinstance(way, Toolroll):
            with found.laps.lap((way.name, "verify")):
                way.verify()


def raw_encode(tok: Any, conversation: Conversation, at: int, laps: Laps, turns: int) -> None:
    """Time the encode of the new bodies with the bare tokenizer."""
    encode = tok.backend_tokenizer.encode
    for turn, exchange in enumerate(conversation.turns[:turns], 1):
        bodies = [message["content"] for message in exchange.new]
        with laps.lap((RAW, at, turn)):
            for body in bodies:
                _ = encode(body, add_special_tokens=False).ids


def table(found: Measured) -> Table:
    """Tabulate."""
    head = "way,first prompt,turn 5,turn 100,turn 100 over turn 5,30 prompts in ms"
    head += ",30 prompts over the raw encode,check of 30 turns,prompts as rendered"
    made = Table("Prompt building, microseconds of CPU", head.split(","))
    raw_prompts = found.of_prompts(RAW)
    for name in found.names:
        first = found.laps.median((name, "first")) if name != RAW else 0.0
        early, late = found.of_turns(name, EARLY), found.of_turns(name, LATE)
        prompts = found.of_prompts(name)
        checked = (name, "verify") in found.laps.times
        equal = found.equal.get(name, [])
        made.rows.append(
            [
                name,
                number(first) if first else "",
                number(early),
                number(late),
                number(late / early),
                number((first + prompts) / 1000),
                number(prompts / raw_prompts),
                number(found.laps.median((name, "verify"))) if checked else "",
                f"{sum(equal)}/{len(equal)}" if equal else "" if name == RAW else "text",
            ]
        )
    return made


def add_figures(made: Table, found: Measured) -> None:
    """Add required ratios and the figures of docs/speed.md."""
    whole = {
        name: found.laps.median((name, "first")) + found.of_prompts(name)
        for name in found.names
        if name != RAW
    }
    long = {name: found.of_turns(name, LATE) / found.of_turns(name, EARLY) for name in found.names}
    made.figures |= {
        "deltas.prompts": whole[OURS] / 1000,
        "deltas.full": whole[FULL] / 1000,
        "deltas.over_raw": found.of_prompts(OURS) / found.of_prompts(RAW),
        "deltas.long": long[OURS],
        "deltas.tokens": statistics.fmean(found.lengths[TURNS]),
    }
    strands = Strands.name
    if strands in whole:
        made.figures["deltas.strands"] = whole[strands] / 1000
        made.figures["deltas.strands_long"] = long[strands]
    over_full = whole[OURS] / whole[FULL]
    made.required += [
        Required("CPU of 30 prompts, toolroll over full render", over_full, 0.1),
        Required("CPU of turn 100 over turn 5, toolroll", long[OURS], 2.5),
    ]


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    load_of = workload(TURNS)
    talks = load_of.conversations[: 2 if quick else 6]
    found, skipped = measure(talks, load_of.tools, rounds=1 if quick else 2)
    made = table(found)
    add_figures(made, found)
    tokens = ", ".join(f"{statistics.fmean(count):,.0f}" for count in found.lengths.values())
    made.notes += [
        f"{len(talks)} conversations, continued to {TURNS} turns. "
        f"Prompt tokens at turns {PROMPTS} and {TURNS}: {tokens}.",
        f"Turns 5 and {TURNS}: means over five turns, {EARLY[0]} to {EARLY[-1]} and {LATE[0]} to "
        f"{LATE[-1]}, with the same text up to digits. The raw encode has no first prompt.",
        *(f"Skipped: {why}." for why in skipped),
    ]
    return made
