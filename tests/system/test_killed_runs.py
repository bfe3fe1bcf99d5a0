"""`kill -9` at any moment loses nothing, doubles nothing, and leaves nothing running."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.faults.size import FULL
from support.faults.tally import Tally, contents
from support.killed_run import MARKER, TURNS
from support.processes import python
from support.program_trials import processes_of, refusal

from toolroll.rollout.runs.episode_file import read_episodes

pytestmark = pytest.mark.faults
EPISODES, KILLS = 100, 20
TRIAL_KILLS = 20 if FULL else 8


def killed(*words: object) -> tuple[Any, str]:
    """What the program reports of a run that it has killed again and again, and what it prints for
    people."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    done = python("-m", "support.killed_run", *words, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("seed", [11, 12, 13, 14] if FULL else [11])
def test_a_run_killed_20_times_is_the_whole_run(tmp_path: Path, tally: Tally, seed: int) -> None:
    found, errors = killed("episodes", tmp_path, EPISODES, KILLS, seed)
    assert found["kills"] == KILLS, found
    assert found["lines"] == sorted(found["lines"]), "nothing that was written is lost"
    assert 0 < found["lines"][-1] < EPISODES, "the kills hit a run under way"
    assert len(set(found["lines"])) > 5, found
    whole = contents(read_episodes(tmp_path / "whole"))
    tally.tried(KILLS)
    tally.texts(errors)
    tally.played(list(read_episodes(tmp_path / "killed")), whole, whole)
    tally.check()
    assert len(whole) == EPISODES
    assert {e["reward"] for e in whole.values()} == {0.0, 1.0}
    assert sum(len(part["turns"]) for e in whole.values() for part in e["trajectories"]) > EPISODES


@pytest.mark.skipif(bool(refusal()), reason=f"needs user namespaces: {refusal()}")
def test_killed_trials_leave_and_lose_nothing(tmp_path: Path) -> None:
    found, _ = killed("trials", tmp_path, TRIAL_KILLS)
    samples = found["samples"]
    while processes_of(f"sleep {MARKER}"):  # the end of its parent reaches a process later
        pass
    episodes = list(read_episodes(tmp_path / "run"))
    assert sorted(episode.sample for episode in episodes) == list(range(samples))
    assert [episode.result.reward for episode in episodes] == [1.0] * samples
    kept = list(read_episodes(tmp_path / "sessions"))
    answers = sum(len(part.turns) for each in kept for part in each.result.trajectories)
    trials = [each.result.reward for each in kept]
    assert answers >= found["answers"] + samples * TURNS, "an answer of a killed trial is lost"
    assert trials.count(1.0) >= samples
    assert None in trials, "killed trials have no reward"
    assert trials.count(0.0) == 0
    for each in kept:
        metrics = each.result.metrics
        assert metrics["trained_tokens"] == metrics["completion_tokens"]
    whole = [each for each in kept if each.result.reward is not None]
    assert {len(each.result.trajectories[0].turns) for each in whole} == {TURNS}
    journal = (tmp_path / "sessions" / "sessions.jsonl").read_bytes().splitlines()
    ends = sum(json.loads(line)["kind"] == "end" for line in journal)
    assert ends == sum(json.loads(line)["kind"] == "session" for line in journal)
