"""`kill -9` at any moment loses nothing and doubles nothing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.faults.size import FULL
from support.faults.tally import Tally, contents
from support.processes import python

from toolroll.rollout.runs.episode_file import read_episodes

EPISODES, KILLS = 100, 20


@pytest.mark.faults
@pytest.mark.parametrize("seed", [11, 12, 13, 14] if FULL else [11])
def test_a_run_that_is_killed_twenty_times_is_the_undisturbed_run(
    tmp_path: Path, tally: Tally, seed: int
) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    done = python("-m", "support.killed_run", tmp_path, EPISODES, KILLS, seed, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS, found
    assert found["lines"] == sorted(found["lines"]), "nothing that was written is lost"
    assert 0 < found["lines"][-1] < EPISODES, "the kills hit a run under way"
    assert len(set(found["lines"])) > 5, found
    whole = contents(read_episodes(tmp_path / "whole"))
    tally.tried(KILLS)
    tally.texts(done.stderr)
    tally.played(list(read_episodes(tmp_path / "killed")), whole, whole)
    tally.check()
    assert len(whole) == EPISODES
    assert {e["reward"] for e in whole.values()} == {0.0, 1.0}
    assert sum(len(part["turns"]) for e in whole.values() for part in e["trajectories"]) > EPISODES
