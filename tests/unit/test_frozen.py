"""Tokens, masks, logprobs, forks and rewards are what they were: 200 conversations, 50 endpoint
sessions, 20 slime samples and 100 episodes.

These say that a change of the code's shape changed nothing; whether the tokens are right is for the
other tests to say. After a change that is meant to change them: TOOLROLL_FREEZE=1 writes new ones.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
from support.frozen import play_all

pytestmark = pytest.mark.slow

FROZEN = Path(__file__).parents[1] / "support" / "frozen.json"


def test_nothing_changed(tmp_path: Path) -> None:
    played = {kind: _digests(items) for kind, items in play_all(tmp_path).items()}
    assert {kind: len(items) for kind, items in played.items()} == {
        "conversations": 200,
        "sessions": 50,
        "samples": 20,
        "episodes": 100,
    }
    if os.environ.get("TOOLROLL_FREEZE"):
        FROZEN.write_text(json.dumps(played, indent=0) + "\n")
    for kind, frozen in json.loads(FROZEN.read_text()).items():
        assert played[kind] == frozen, kind


def _digests(items: dict[str, object]) -> dict[str, str]:
    return {
        name: hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:16]
        for name, item in items.items()
    }
