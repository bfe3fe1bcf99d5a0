"""Deltas under several chat templates, with reasoning in every sampled turn.

A template may rewrite history: Qwen3's removes reasoning once a user message follows. Such a delta
needs more than one render. With history="preserve", each conversation stays one sequence.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from support.qwen import all_templates

from benchmarks.clock import Laps
from benchmarks.conversations import (
    QWEN,
    Conversation,
    renumbered,
    tokenizer,
    workload,
)
from benchmarks.deltas import RAW, Toolroll, raw_encode
from benchmarks.peers import readable
from benchmarks.tables import Table, number
from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Message, Tool

TEMPLATES = (
    QWEN,
    "qwen3",
    "qwen3_5_think",
    "qwen3_5_nothink",
    "gptoss",
    "glm4moe",
    "deepseekv3",
    "gemma4",
    "llama3_1",
    "nemotron_3_nano",
    "kimi_k2_5",
    "minimax_m2_5",
)
TURNS = 30
THOUGHT = "The customer gave the reservation number. I look at the policy before I answer."


def sampled(
    template: ChatTemplate,
    history: list[Message],
    turn: Message,
    new: list[Message],
    tools: list[Tool],
) -> list[int]:
    """Return the ids that a model samples for `turn` after `history`: what the template shows of
    it, up to its last stop token. GLM stops at the role of the next message.
    """
    render, stops = template.renderer.render, template.stop_texts
    before = render(history, tools, generate=True)
    text = render([*history, turn], tools, generate=False)
    # a prompt may open a thought, or write an empty one, where history shows another
    said = text[len(os.path.commonprefix([before, text])) :]  # noqa: RUF071 (characters)
    ends = [said.rfind(stop) + len(stop) for stop in stops if stop in said]
    if ends:
        said = said[: max(ends)]
    else:
        full, said = render([*history, turn, *new], tools, generate=True), said.rstrip()
        role = template.encoder.pattern.search(full, full.rindex(said[-30:]) + len(said[-30:]))
        said += role.group() if role else ""
    return list(template.tokenizer.encode(said, add_special_tokens=False))


def row(
    name: str, tools: list[Tool], conversations: Sequence[Conversation], turns: int
) -> list[str]:
    """Play the first `turns` of the conversations under the template `name`: once without the
    clock, and then with it and other digits.
    """
    tok = tokenizer(name)
    way = Toolroll(tok, history="preserve")
    preserved, laps = 0, Laps()
    for timed in (False, True):
        preserved, laps = 0, Laps()
        for at, given in enumerate(conversations):
            conversation = renumbered(given, 1000 * timed + at)
            history = list(conversation.first)
            way.begin(list(conversation.first), tools)
            for turn in conversation.turns[:turns]:
                assistant = {**readable(turn.assistant), "reasoning_content": THOUGHT}
                ids = sampled(way.template, history, assistant, turn.new, tools)
                with laps.lap("turn"):
                    way.turn(assistant, ids, turn.new)
                history += [assistant, *turn.new]
            with laps.lap("verify"):
                way.verify()
            preserved += way.preserved
            raw_encode(tok, conversation, at, laps, turns)
    encodes = [(RAW, at, turn) for at in range(len(conversations)) for turn in range(1, turns + 1)]
    raw = statistics.fmean(map(laps.median, encodes))
    cost = statistics.fmean(laps.times["turn"])
    return [
        name,
        number(cost),
        number(cost / raw),
        number(statistics.fmean(laps.times["verify"]) / turns),
        f"{preserved} of {turns * len(conversations):,}",
    ]


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    talks = workload()
    count, turns = (1, 10) if quick else (6, TURNS)
    chosen = talks.conversations[:count]
    head = "template,us of CPU per turn,over the raw encode,check per turn"
    head += ",deltas whose history the template rewrites"
    made = Table("Templates, with a thought in every turn", head.split(","))
    known, skipped = all_templates(), []
    for name in TEMPLATES:
        if name not in known and f"data/{name}" not in known:
            skipped.append(name)
            continue
        try:
            made.rows.append(row(name, talks.tools, chosen, turns))
        except (HistoryRewrittenError, TemplateError) as error:
            made.rows.append([name, f"refused: {error}", "", "", ""])
    ratios = [float(cells[2]) for cells in made.rows if cells[2]]
    made.figures |= {"templates.least": min(ratios), "templates.most": max(ratios)}
    made.notes.append(f'{len(chosen)} conversations, {turns} turns each, history="preserve".')
    if skipped:
        made.notes.append(f"Skipped, because TOOLROLL_TEST_DATA is not set: {', '.join(skipped)}.")
    return made
