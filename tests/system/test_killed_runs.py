"""`kill -9` at any moment loses nothing and doubles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.patience import PATIENCE
from support.results import content

from toolroll.rollout.store import read_episodes

EPISODES, KILLS = 100, 20


def episodes(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """What each episode came to: tokens, masks, logprobs, messages, rewards, statuses."""
    return {(found.task_id, found.sample): content(found, circumstances=False) for found in read_episodes(folder)}


def test_a_run_that_is_killed_twenty_times_is_the_undisturbed_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.killed_run", str(tmp_path), str(EPISODES), str(KILLS), "11"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS, found
    assert found["lines"] == sorted(found["lines"]), "nothing that was written is lost"
    assert 0 < found["lines"][-1] < EPISODES, "the kills hit a run under way"
    assert len(set(found["lines"])) > 5, found
    whole, killed = episodes(tmp_path / "whole"), episodes(tmp_path / "killed")
    assert len(whole) == len(list(read_episodes(tmp_path / "killed"))) == EPISODES
    assert whole.keys() == killed.keys()
    assert [key for key in whole if whole[key] != killed[key]] == []
    assert {e["reward"] for e in whole.values()} == {0.0, 1.0}
    assert sum(len(part["turns"]) for e in whole.values() for part in e["trajectories"]) > EPISODES
