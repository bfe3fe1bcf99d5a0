"""Adversarial templates and random dialogues through `ChatTemplate`, one delta at a time.

One `ChatTemplate` plays all dialogues of a template, so that whatever it remembers is put to the
test. By default a seeded sample; `TOOLROLL_ADVERSARIAL=full` plays everything, and
`TOOLROLL_ADVERSARIAL_SEED=7` other dialogues:

    TOOLROLL_ADVERSARIAL=full python -m pytest tests/adversarial -q
"""

from __future__ import annotations

import pytest
from support.adversarial.play import UNNEEDED, WRONG, Player, bad, counts
from support.adversarial.size import FULL, SEED, sampled
from support.adversarial.templates import Template, by_hand, generated

pytestmark = pytest.mark.tokens

BY_HAND = {template.name: template for template in by_hand()}
PRESERVED = sampled(list(BY_HAND), 15)
GENERATED = {template.name: template for template in sampled(generated(), 24)}
# The sentinel of a derivation is not what such a template takes, or the turn's text decides what
# follows.
FORKS_TOO_OFTEN = 0.02


def judge(template: Template) -> None:
    """Play `template` under both policies; with "preserve", a few dialogues."""
    rows = Player(template).play_all(SEED, each=3 if FULL else 1, limit=None if FULL else 2)
    kept = Player(template, "preserve")
    if FULL or template.name in PRESERVED:
        kept.play_all(f"{SEED}/preserve", limit=10 if FULL else 1)
    assert len(rows) > len({row.dialogue for row in rows}), "nothing was judged"
    wrong = bad(rows, WRONG, 5) + bad(kept.rows, WRONG, 5)
    assert not wrong, wrong


@pytest.mark.parametrize("name", [*BY_HAND, *GENERATED])
def test_templates_by_hand_and_those_that_ask_one_question(name: str) -> None:
    judge({**BY_HAND, **GENERATED}[name])


def test_what_could_be_appended_is_appended() -> None:
    """Unneeded forks and refusals are rare, and only where the text of the turn decides."""
    rows = []
    for template in sampled(list(BY_HAND.values()), 6):
        rows += Player(template).play_all(f"{SEED}/unneeded", limit=None if FULL else 3)
    found = counts(rows)
    unneeded = sum(found[verdict] for verdict in UNNEEDED)
    assert unneeded <= FORKS_TOO_OFTEN * found["exact"], bad(rows, UNNEEDED)


def test_there_are_enough_templates() -> None:
    assert len(by_hand()) >= 80
    assert len(generated()) >= 500
    assert len({template.source for template in [*by_hand(), *generated()]}) >= 900
