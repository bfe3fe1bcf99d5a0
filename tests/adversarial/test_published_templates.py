"""Twelve-turn loops of one shape under the chat templates of the wheel `trl`: a third of them, or all
with TOOLROLL_ADVERSARIAL=full.

A loop that says nothing about a template (it refuses it, or shows no calls) is counted and named.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.adversarial.dialogues import SHAPES, loop
from support.adversarial.play import WRONG, Player, Row, bad, counts
from support.adversarial.published_templates import template_of
from support.adversarial.size import FULL, SEED, sampled
from support.adversarial.token_judge import Refused
from support.qwen import trl_templates

from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

SOURCES = trl_templates()
# Their turns cannot be told apart: they take no text contents, or write no control token behind a
# turn.
NO_JUDGE = {
    "idefics3", "idefics3_training", "llava_next", "llava_next_training", "smolvlm",
    "smolvlm_training",
}  # fmt: skip


def played(player: Player, name: str, number: int, shape: dict[str, Any]) -> list[Row]:
    """One loop; with another content beside calls if the template does not take an empty one."""
    for empty in ("", None):
        before = len(player.rows)
        player.play(loop(f"{name}/{SEED}/{number}", published=True, empty=empty, **shape))
        rows = player.rows[before:]
        if counts(rows)["inapplicable"] == 0 or shape["calls"] == 0:
            break
    return rows


@pytest.mark.parametrize("name", sampled(list(SOURCES), 25))
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
