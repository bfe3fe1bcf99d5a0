"""Adversarial templates in whole episodes: `Conversation` against the embedded engine.

A prompt that is not right must never be trained on, and a right episode must be trained. Under the
default check there is nothing for it to find; with it off, there is nothing that it would have
found. `TOOLROLL_ADVERSARIAL=full` plays every template."""

from __future__ import annotations

from typing import Any

import pytest
from support.adversarial.dialogues import dialogues, loop, mixed
from support.adversarial.episodes import Outcome, play_episodes
from support.adversarial.play import control_words, tokenizer_of
from support.adversarial.rewrites import kept, rewriting
from support.adversarial.size import FULL, SEED, sampled
from support.adversarial.templates import Template, by_hand, generated
from support.adversarial.token_judge import Judge

pytestmark = pytest.mark.tokens

ALL = {template.name: template for template in [*by_hand(), *generated()]}
ALWAYS = [template.name for template in by_hand() if template.name.startswith("style_")]
OTHERS = [template.name for template in by_hand() if template.name not in ALWAYS]
NAMES = [*ALWAYS, *sampled(OTHERS, 6), *sampled([t.name for t in generated()], 150 if FULL else 3)]
REPEATS = ("before_content.title",)
"""Templates that show an assistant's text again in what follows it. If the model wrote the text of
a control token, the check cannot tell that text from the template's own token, and excludes it."""
VERIFY: dict[str, dict[str, Any]] = {"default": {}, "off": {"verify": "off"}}


def excluded(outcome: Outcome) -> bool:
    """Whether the check cannot tell that this episode is right."""
    return outcome.name.startswith(tuple(f"control/{name}/" for name in REPEATS))


def failures(outcomes: list[Outcome]) -> str:
    """A line for each: what was wrong, what of it was trained, what right was left out."""
    lines = []
    for outcome in outcomes:
        if outcome.wrong:
            lines.append(
                f"{outcome.name}: {outcome.trained_wrong} turns trained after {outcome.wrong}"
            )
        if outcome.left_out and not excluded(outcome):
            lines.append(
                f"{outcome.name}: {outcome.left_out} turns left out, and nothing was wrong"
            )
    return "\n".join(lines)


def scripts(template: Template, verify: str) -> list[Any]:
    """Two dialogues, one of them a loop; all ten kinds if everything is played."""
    words = control_words(Judge(tokenizer_of(template), template))
    made = dialogues(f"{template.name}/{SEED}/{verify}", words)
    return made if FULL else [*sampled(made[:5], 1), *sampled(made[5:], 1)]


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("name", NAMES)
async def test_no_episode_is_wrong_and_all_are_trained(name: str, verify: str) -> None:
    template = ALL[name]
    outcomes = await play_episodes(template, scripts(template, verify), **VERIFY[verify])
    assert not failures(outcomes), failures(outcomes)
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
    assert not failures(outcomes), failures(outcomes)
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
    assert not failures(outcomes), failures(outcomes)
    for outcome in outcomes:
        starts = list(kept(template, outcome.prompts))
        assert len(starts) <= outcome.counted, (outcome.name, starts)
        assert outcome.rows and (outcome.trained or outcome.ended)
