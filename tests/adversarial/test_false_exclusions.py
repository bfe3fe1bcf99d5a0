"""Right episodes are trained, whatever their messages spell.

Dialogues with and without control-token text are played under published templates. The judge
shares no code with toolroll, and says which episodes are right. Of these, fewer than 1 % may be
excluded. `TOOLROLL_ADVERSARIAL=full` plays every template.
"""

import random
from collections import Counter
from contextlib import suppress

import pytest
from support.adversarial.dialogues import WORDS, spoiled
from support.adversarial.episodes import Outcome, play_episodes
from support.adversarial.size import FULL, SEED
from support.adversarial.templates import Template
from support.oracle import Inapplicable, Oracle, Refused
from support.oracle_scenarios import AGAIN, BASE, CALL, RESULT, TEXT, Scenario
from support.qwen import tokenizer_for, tool_templates

from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template.cursor import KEPT

pytestmark = pytest.mark.tokens

SOURCES = tool_templates()
FEW = (
    "qwen2_5", "qwen3", "qwen3_5_nothink", "nemotron_3_nano", "nemotron_3_ultra_training", "gemma4",
    "gptoss", "llama3_1", "lfm2",
)  # fmt: skip
EACH = 12 if FULL else 8


def stops_of(oracle: Oracle) -> tuple[str, ...]:
    """The tokens that end a turn of text, and one of calls; none if the template has neither."""
    found: list[int] = []
    for turn, new in ((TEXT, AGAIN), (CALL, RESULT)):
        with suppress(Inapplicable, Refused):
            case, _ = oracle.judge(Scenario("", BASE, turn, (new,)))
            found += case.stop_token_ids
    texts = {index: text for text, index in oracle.control.items()}
    return tuple(dict.fromkeys(texts[index] for index in found))


def state(outcome: Outcome) -> str:
    if outcome.wrong or any(row.verdict == "unclear" for row in outcome.rows):
        return "not right for certain"
    return "right" if outcome.rows else "not played"


@pytest.mark.parametrize("kind", ["plain", "spoiled"])
async def test_right_episodes_are_trained(kind: str) -> None:
    counts = Counter[str]()
    for name in SOURCES if FULL else FEW:
        oracle = Oracle(tokenizer_for(SOURCES[name]))
        stops = stops_of(oracle)
        if not stops:
            continue
        closes = ("<|end|>",) if "<|return|>" in stops else ()
        template = Template(name, oracle.source, stops, closes=closes)
        control = sorted(text for text in oracle.control if text.strip())
        own = random.Random(name).sample(control, min(8, len(control)))
        words = [*WORDS, *own] if kind == "spoiled" else []
        made = [spoiled(f"{name}/{SEED}/{kind}/{n}", words) for n in range(EACH)]
        played: list[Conversation] = []
        outcomes = await play_episodes(
            template, made, tokenizer=oracle.tokenizer, scripted=True, keep=played.append
        )
        for outcome, dialogue in zip(outcomes, played, strict=True):
            reasons = dialogue.mismatches.keys() - KEPT
            excluded = f", excluded: {min(reasons)}" if reasons else ""
            counts[state(outcome) + excluded] += 1
    right = sum(count for what, count in counts.items() if what.startswith("right"))
    assert right > 0.8 * counts.total()
    assert right - counts["right"] < 0.01 * right, counts
