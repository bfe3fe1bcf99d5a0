"""What it costs to meet a template: conversations under one that was never rendered before, from the first delta on.

Nothing is known at the beginning: no head, no frame, no word. Goal: the deltas of a batch cost at most 1.8x a raw encode of the new
bodies, with everything that is learned on the way and its checks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.clock import Laps
from benchmarks.conversations import QWEN, Conversation, Workload, as_sampled, tokenizer, workload
from benchmarks.deltas import FLOOR, Toolroll, floor, readable
from benchmarks.tables import Table, number, verdict
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.render import Renderer
from toolroll.rollout.types import Tool

TEMPLATES = (QWEN, "qwen3", "qwen3_5_nothink")
TURNS, STOP = 30, "<|im_end|>"
GOAL = 1.8


@dataclass
class Met:
    """Microseconds of CPU of all deltas of a conversation, one entry for each; how many of them were derived by renders."""

    ours: list[float]
    raw: list[float]
    derived: list[int]


def meet(name: str, load: Workload, conversations: Sequence[Conversation]) -> Met:
    """Play them in order under the template `name`."""
    tok = tokenizer(name)  # a new one each time: what was learned under another is not known here
    renderer = Renderer(tok)
    said = [[as_rendered(renderer, load.tools, given, at) for at in range(TURNS)] for given in conversations]
    way = Toolroll(ChatTemplate(tok, history="preserve"), checked=True)
    end = tok.convert_tokens_to_ids(STOP)
    found = Met([], [], [])
    for conversation, texts in zip(conversations, said, strict=True):
        way.begin(list(conversation.first), load.tools)
        framed, spent = way.framed, 0.0
        for turn, text in zip(conversation.turns[:TURNS], texts, strict=True):
            ids = [*tok.encode(text, add_special_tokens=False), end]
            way.sampled(ids)
            began = time.thread_time_ns()
            way.turn(readable(turn.assistant), ids, turn.new)
            spent += (time.thread_time_ns() - began) / 1000
        laps = Laps()
        floor(tok, conversation, 0, laps)
        found.ours.append(spent)
        found.raw.append(sum(laps.median((FLOOR, 0, turn)) for turn in range(1, TURNS + 1)))
        found.derived.append(TURNS - (way.framed - framed))
    return found


def as_rendered(renderer: Renderer, tools: list[Tool], conversation: Conversation, at: int) -> str:
    """Turn `at` in the template's own format, as it stands once messages follow it, without the stop token."""
    turns = conversation.turns
    before = [*conversation.first, *(message for turn in turns[:at] for message in (readable(turn.assistant), *turn.new))]
    prompt = renderer.render(before, tools, generate=True)
    whole = renderer.render([*before, readable(turns[at].assistant), *turns[at].new], tools, generate=True)
    shown = whole.removeprefix(prompt) if whole.startswith(prompt) else ""
    return shown[: shown.find(STOP)] if STOP in shown else as_sampled(turns[at].assistant)


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    load = workload()
    chosen = load.conversations[: 10 if quick else 40]
    made = Table(
        f"A template that is met for the first time: {len(chosen)} conversations of {TURNS} turns, one after the other",
        ["template", "first conversation, us a turn", "over the floor", "all, us a turn", "over the floor", "derived by renders"],
    )
    for name in TEMPLATES:
        found = meet(name, load, chosen)
        over = sum(found.ours) / sum(found.raw)
        made.rows.append(
            [
                name,
                number(found.ours[0] / TURNS),
                f"{found.ours[0] / found.raw[0]:.2f}",
                number(sum(found.ours) / TURNS / len(chosen)),
                f"{over:.2f}",
                f"{sum(found.derived)} of {TURNS * len(chosen):,}",
            ]
        )
        made.notes.append(f"Goal: {name}, all conversations over the floor at most {GOAL}: {over:.3g}, {verdict(held=over <= GOAL)}.")
    made.notes.append('With verify="sample": the checks of new frames, which render the whole conversation, are in these figures.')
    return made
