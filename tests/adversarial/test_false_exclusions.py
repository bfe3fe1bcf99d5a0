"""Right episodes are trained, whatever their messages spell.

Dialogues with and without control-token text are played under published templates. The judge
shares no code with toolroll, and says which episodes are right. Of these, fewer than 1 % may be
excluded. `TOOLROLL_ADVERSARIAL=full` plays every template.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from support.adversarial.dialogues import WORDS, spoiled
from support.adversarial.episodes import Outcome, play_episodes
from support.adversarial.published_templates import template_of
from support.adversarial.size import FULL, SEED
from support.adversarial.templates import Template
from support.adversarial.token_judge import Judge, Refused
from support.qwen import tool_templates

from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template.cursor import KEPT

pytestmark = pytest.mark.tokens

SOURCES = tool_templates()
FEW = (
    "qwen2_5", "qwen3", "qwen3_5_nothink", "nemotron_3_nano", "nemotron_3_ultra_training", "gemma4",
    "gptoss", "llama3_1", "lfm2",
)  # fmt: skip
EACH = 12 if FULL else 8


def templates() -> Iterator[tuple[Template, object]]:
    for name in SOURCES if FULL else FEW:
        try:
            yield template_of(name, SOURCES[name])
        except Refused:  # the judge cannot tell what ends a turn
            continue


def state(outcome: Outcome) -> str:
    if outcome.wrong or any(row.verdict == "unclear" for row in outcome.rows):
        return "not right for certain"
    return "right" if outcome.rows else "not played"


@pytest.mark.parametrize("kind", ["plain", "spoiled"])
async def test_right_episodes_are_trained(kind: str) -> None:
    counts = Counter[str]()
    for template, tokenizer in templates():
        control = sorted(text for text in Judge(tokenizer, template).control if text.strip())
        own = random.Random(template.name).sample(control, min(8, len(control)))
        words = [*WORDS, *own] if kind == "spoiled" else []
        made = [spoiled(f"{template.name}/{SEED}/{kind}/{n}", words) for n in range(EACH)]
        played: list[Conversation] = []
        outcomes = await play_episodes(
            template, made, tokenizer=tokenizer, scripted=True, keep=played.append
        )
        for outcome, dialogue in zip(outcomes, played, strict=True):
            reasons = dialogue.mismatches.keys() - KEPT
            excluded = f", excluded: {min(reasons)}" if reasons else ""
            counts[state(outcome) + excluded] += 1
    right = sum(count for what, count in counts.items() if what.startswith("right"))
    assert right > 0.8 * counts.total()
    assert right - counts["right"] < 0.01 * right, counts
