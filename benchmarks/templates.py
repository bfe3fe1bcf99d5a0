"""Deltas under several chat templates, with reasoning in every sampled turn.

A template may rewrite history: Qwen3's removes reasoning once a user message follows. Such a delta
needs more than one render. With history="preserve", each conversation stays one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from benchmarks.deltas import FLOOR, Toolroll, floor
from benchmarks.peers import readable
from benchmarks.tables import Table, number
from toolroll.rollout.types import Message

TEMPLATES = (QWEN, "qwen3", "qwen3_5_nothink")
TURNS, STOP = 30, "<|im_end|>"
THOUGHT = "The customer gave the reservation number. I look at the policy before I answer."


def with_thought(assistant: Message) -> tuple[Message, str]:
    """Return the message with reasoning, and the text that a model samples for it."""
    text = f"<think>\n{THOUGHT}\n</think>\n\n{as_sampled(assistant)}"
    return {**readable(assistant), "reasoning_content": THOUGHT}, text


def row(name: str, load: Workload, conversations: Sequence[Conversation]) -> list[str]:
    """Play the conversations under the template `name`, first without and then with the clock and
    other digits."""
    tok = tokenizer(name)
    way = Toolroll(tok, history="preserve")
    end = tok.convert_tokens_to_ids(STOP)
    preserved, laps = 0, Laps()
    for timed in (False, True):
        preserved, laps = 0, Laps()
        for at, given in enumerate(conversations):
            conversation = renumbered(given, int(timed))
            with laps.lap("first"):
                way.begin(list(conversation.first), load.tools)
            for turn in conversation.turns[:TURNS]:
                assistant, text = with_thought(turn.assistant)
                ids = [*tok.encode(text, add_special_tokens=False), end]
                with laps.lap("turn"):
                    way.sampled(ids)
                    way.turn(assistant, ids, turn.new)
            with laps.lap("verify"):
                way.verify()
            preserved += way.preserved
            if timed:
                floor(tok, conversation, at, laps)
    turns = range(1, TURNS + 1)
    raw = mean(laps.median((FLOOR, at, turn)) for at in range(len(conversations)) for turn in turns)
    cost = mean(laps.times["turn"])
    return [
        name,
        number(mean(laps.times["first"])),
        number(cost),
        f"{cost / raw:.2f}",
        number(mean(laps.times["verify"])),
        f"{preserved} of {TURNS * len(conversations):,}",
    ]


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    load = workload()
    chosen = load.conversations[: 4 if quick else 12]
    made = Table(
        "Templates, with a thought in every turn: microseconds of CPU",
        [
            "template",
            "first prompt",
            "a turn",
            "over the floor",
            "verification at the end of 30 turns",
            "deltas whose history the template rewrites",
        ],
    )
    made.rows += [row(name, load, chosen) for name in TEMPLATES]
    made.notes.append(f'{len(chosen)} conversations of {TURNS} turns, history="preserve".')
    return made
