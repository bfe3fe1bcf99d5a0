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
from support.adversarial.templates import by_hand, generated

pytestmark = pytest.mark.tokens

BY_HAND = by_hand()
TEMPLATES = {template.name: template for template in [*BY_HAND, *sampled(generated(), 24)]}
PRESERVED = sampled(BY_HAND, 15)
# The sentinel of a derivation is not what such a template takes, or the turn's text decides what
# follows.
FORKS_TOO_OFTEN = 0.02


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_delta_is_wrong(name: str) -> None:
    """Under both policies; with "preserve", in a few dialogues."""
    template = TEMPLATES[name]
    rows = Player(template).play_all(SEED, each=3 if FULL else 1, limit=None if FULL else 2)
    kept = Player(template, "preserve")
    if FULL or template in PRESERVED:
        kept.play_all(f"{SEED}/preserve", limit=10 if FULL else 1)
    assert len(rows) > len({row.dialogue for row in rows}), "nothing was judged"
    wrong = bad(rows, WRONG, 5) + bad(kept.rows, WRONG, 5)
    assert not wrong, wrong


def test_what_could_be_appended_is_appended() -> None:
    """Unneeded forks and refusals are rare, and only where the text of the turn decides."""
    rows = []
    for template in sampled(BY_HAND, 6):
        rows += Player(template).play_all(f"{SEED}/unneeded", limit=None if FULL else 3)
    found = counts(rows)
    unneeded = sum(found[verdict] for verdict in UNNEEDED)
    assert unneeded <= FORKS_TOO_OFTEN * found["exact"], bad(rows, UNNEEDED)


def test_there_are_enough_templates() -> None:
    assert len(BY_HAND) >= 80
    assert len(generated()) >= 500
    assert len({template.source for template in [*BY_HAND, *generated()]}) >= 900
