"""Twelve-turn loops of one shape under the chat templates of published wheels.

By default a third of those of `trl`, which is installed for tests. For all, and those of axolotl
and xinference:

    pip download --no-deps -d FOLDER axolotl==0.19.0 xinference==4.1.0
    TOOLROLL_ADVERSARIAL_WHEELS=FOLDER python -m pytest tests/adversarial/test_wheels.py -q -rs

A loop that says nothing about a template (it refuses it, or shows no calls) is counted and named.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.adversarial.dialogues import SHAPES, loop
from support.adversarial.episodes import play_episodes
from support.adversarial.play import WRONG, Player, Row, bad, counts, tokenizer_of
from support.adversarial.size import FULL, SEED, sampled
from support.adversarial.templates import by_hand
from support.adversarial.token_judge import Refused
from support.adversarial.wheels import sources, template_of

from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

SOURCES = sources()
# Their turns cannot be told apart: they take no text contents, or write no control token behind a
# turn.
NO_JUDGE = {
    "trl/idefics3", "trl/idefics3_training", "trl/llava_next", "trl/llava_next_training",
        "trl/smolvlm",
    "trl/smolvlm_training", "axolotl/llava", "xinference/Hy-MT2-1.8B", "xinference/baichuan-2-chat",
    "xinference/deepseek-v3", "xinference/minicpm-2b-dpo-bf16", "xinference/qwen3_vl_reranker",
}  # fmt: skip
BY_HAND = {template.name: template for template in by_hand()}
NUMBERING = [name for name in SOURCES if name.startswith("axolotl/command_a_")]
NUMBERING += ["style_command_numbered", "style_chatglm_rounds"]


def played(player: Player, name: str, number: int, shape: dict[str, Any]) -> list[Row]:
    """One loop; with another content beside calls if the template does not take an empty one."""
    for empty in ("", None):
        before = len(player.rows)
        player.play(loop(f"{name}/{SEED}/{number}", published=True, empty=empty, **shape))
        rows = player.rows[before:]
        if counts(rows)["inapplicable"] == 0 or shape["calls"] == 0:
            break
    return rows


PLAYED = list(SOURCES) if FULL or len(SOURCES) > 100 else sampled(list(SOURCES), 25)


@pytest.mark.parametrize("name", PLAYED)
def test_a_loop_of_one_shape_is_exact_to_the_last_turn(name: str) -> None:
    if name in NO_JUDGE:
        with pytest.raises(Refused):
            template_of(name, SOURCES[name], load_embedded_tokenizer)
        return
    template, tokenizer = template_of(name, SOURCES[name], load_embedded_tokenizer)
    player = Player(template, tokenizer=tokenizer)
    shapes = list(enumerate(SHAPES))
    whole: Counter[str] = Counter()
    for number, shape in shapes if FULL else sampled(shapes[:4], 1):
        rows = played(player, name, number, shape)
        whole["judged" if counts(rows)["inapplicable"] == 0 else "said nothing"] += 1
    wrong = bad(player.rows, WRONG, 3)
    assert not wrong, wrong
    assert whole["judged"] or not FULL, [
        row for row in player.rows if row.verdict == "inapplicable"
    ]


@pytest.mark.parametrize("name", NUMBERING)
@pytest.mark.parametrize("verify", [None, "off"])
async def test_a_template_that_numbers_is_correct_and_trained(
    name: str, verify: str | None
) -> None:
    """In the template's own format of calls, and of results with running numbers."""
    if name in BY_HAND:
        template, tokenizer = BY_HAND[name], tokenizer_of(BY_HAND[name])
    else:
        template, tokenizer = template_of(name, SOURCES[name], load_embedded_tokenizer)
    made = [
        loop(f"{name}/{SEED}/{n}", calls=calls, published=True)
        for n, calls in enumerate((1, 2, 1, 0) * (5 if FULL else 1))
    ]
    settings: dict[str, Any] = {} if verify is None else {"verify": verify}
    outcomes = await play_episodes(template, made, tokenizer=tokenizer, scripted=True, **settings)
    assert not [outcome.wrong for outcome in outcomes if outcome.wrong]
    assert [outcome.trained for outcome in outcomes] == [len(script.steps) + 1 for script in made]
