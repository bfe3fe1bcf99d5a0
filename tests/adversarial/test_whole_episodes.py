"""Adversarial and published templates in whole episodes: `Conversation` and the embedded engine.

A prompt that is not right must never be trained on, and a right episode must be trained. Under the
default check there is nothing for it to find; with it off, there is nothing that it would have
found. By default a seeded sample; `TOOLROLL_ADVERSARIAL=full` plays everything, and
`TOOLROLL_ADVERSARIAL_SEED=7` other dialogues:

    TOOLROLL_ADVERSARIAL=full python -m pytest tests/adversarial -q
"""

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from support.adversarial.dialogues import WORDS, dialogues, loop, mixed, spoiled
from support.adversarial.episodes import Outcome, control_words, play_episodes, tokenizer_of
from support.adversarial.size import FULL, SEED, sampled
from support.adversarial.templates import Template, by_hand, generated, kept, rewriting
from support.adversarial.token_judge import Judge
from support.oracle import Inapplicable, Oracle, Refused
from support.oracle_scenarios import AGAIN, BASE, CALL, RESULT, TEXT, Scenario
from support.qwen import tokenizer_for, tool_templates

from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template.cursor import KEPT

pytestmark = pytest.mark.tokens

BY_HAND = [template.name for template in by_hand()]
GENERATED = [template.name for template in generated()]
ALL = {template.name: template for template in [*by_hand(), *generated()]}
ALWAYS = [name for name in BY_HAND if name.startswith("style_")]
OTHERS = sorted({*BY_HAND} - {*ALWAYS})
NAMES = [*ALWAYS, *sampled(OTHERS, 6), *sampled(GENERATED, 150 if FULL else 3)]
PRESERVED = sampled(BY_HAND, 15)
FORKS_TOO_OFTEN = 0.02
"""The text of the turn decides what follows, or a derivation's sentinel is not what it takes."""
REPEATS = ("before_content.title",)
"""Templates that show an assistant's text again in what follows it. If the model wrote the text of
a control token, the check cannot tell that text from the template's own token, and excludes it."""


def excluded(outcome: Outcome) -> bool:
    """Whether the check cannot tell that this episode is right."""
    return outcome.name.startswith(tuple(f"control/{name}/" for name in REPEATS))


def failures(outcomes: list[Outcome]) -> list[tuple[str, str, int]]:
    """What was wrong, with the turns trained after it, and the right turns that were left out."""
    wrong = [(it.name, it.wrong, it.trained_wrong) for it in outcomes if it.wrong]
    left_out = [it for it in outcomes if it.left_out and not excluded(it)]
    return [*wrong, *((it.name, "left out, and nothing was wrong", it.left_out) for it in left_out)]


def scripts(template: Template, seed: str) -> list[Any]:
    """Two dialogues, one of them a loop; all ten kinds if everything is played."""
    words, seed = control_words(Judge(tokenizer_of(template), template)), f"{SEED}/{seed}"
    made, rng = dialogues(f"{template.name}/{seed}", words), random.Random(template.name + seed)
    return made if FULL else [rng.choice(made[:5]), rng.choice(made[5:])]


@pytest.mark.parametrize("name", [*BY_HAND, *sampled(GENERATED, 24)])
async def test_no_prompt_is_wrong_in_the_templates_own_format(name: str) -> None:
    """Under both policies; with "preserve", in some templates."""
    template = ALL[name]
    made = scripts(template, "own")
    outcomes = await play_episodes(template, made, scripted=True, verify="off")
    if FULL or name in PRESERVED:
        outcomes += await play_episodes(
            template, made, scripted=True, history="preserve", verify="off"
        )
    wrong = [outcome.wrong for outcome in outcomes if outcome.wrong]
    assert not wrong, wrong
    assert any(outcome.rows for outcome in outcomes), "nothing was judged"


async def test_what_could_be_appended_is_appended() -> None:
    """Unneeded forks and refusals are rare."""
    rows = []
    for name in sampled(BY_HAND, 6):
        made = scripts(ALL[name], "unneeded")
        outcomes = await play_episodes(ALL[name], made, scripted=True, verify="off")
        rows += [row for outcome in outcomes for row in outcome.rows]
    unneeded = [row for row in rows if row.verdict in ("fork-unneeded", "refused-unneeded")]
    exact = [row for row in rows if row.verdict == "exact"]
    assert len(unneeded) <= FORKS_TOO_OFTEN * len(exact), unneeded


@pytest.mark.parametrize("verify", ["default", "off"])
@pytest.mark.parametrize("name", NAMES)
async def test_no_episode_is_wrong_and_all_are_trained(name: str, verify: str) -> None:
    template = ALL[name]
    settings: dict[str, Any] = {"verify": "off"} if verify == "off" else {}
    outcomes = await play_episodes(template, scripts(template, verify), **settings)
    assert not failures(outcomes)
    # No row: the first prompt was refused, and the judge cannot tell its control tokens either.
    assert all(outcome.rows or outcome.ended for outcome in outcomes)
    assert all(outcome.trained or outcome.ended or excluded(outcome) for outcome in outcomes)


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize(
    "name", ["style_command_numbered", "style_chatglm_rounds", "numbered_results"]
)
async def test_templates_that_number_are_trained_to_the_last_turn(
    name: str, scripted: bool
) -> None:
    shapes = enumerate((1, 2, 1, 0) * (5 if FULL else 1))
    seed = f"{name}/{SEED}"
    made = [loop(f"{seed}/{n}", calls=calls, published=scripted) for n, calls in shapes]
    outcomes = await play_episodes(ALL[name], made, scripted=scripted)
    assert not failures(outcomes)
    assert [outcome.trained for outcome in outcomes] == [len(script.steps) + 1 for script in made]


REWRITING = {template.name: template for template in rewriting()}
HERMES_ONLY = {
    f"close.{how}.eos"
    for how in ("other_at_the_end", "other_when_old", "by_the_calls", "call_at_the_end")
}
"""Sampled turns end with a token that ends none: no model that stops writes their format."""
REWRITTEN = [
    pytest.param(name, scripted, id=f"{name}-{'own format' if scripted else 'hermes'}")
    for name in sampled(list(REWRITING), 16)
    for scripted in (False, True)
    if not (scripted and name in HERMES_ONLY)
]


@pytest.mark.parametrize(("name", "scripted"), REWRITTEN)
async def test_what_is_kept_though_history_shows_it_otherwise_is_counted(
    name: str, scripted: bool
) -> None:
    template, seed = REWRITING[name], f"{name}/{SEED}"
    made = [loop(f"{seed}/1", text=True, thought=True), mixed(seed), loop(f"{seed}/2", calls=2)]
    outcomes = await play_episodes(template, made, scripted=scripted)
    assert not failures(outcomes)
    for outcome in outcomes:
        starts = list(kept(template, outcome.prompts))
        assert len(starts) <= outcome.counted, (outcome.name, starts)
        assert outcome.rows and (outcome.trained or outcome.ended)


# --- published templates --------------------------------------------------------------------------

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
    """Whatever their messages spell, under published templates. The judge says which episodes are
    right. Of these, fewer than 1 % may be excluded."""
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
