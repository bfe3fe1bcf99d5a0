"""A run of program agents that is killed leaves no process, loses no answer, and goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.faults.size import FULL
from support.killed_trials import MARKER, TURNS
from support.processes import printed
from support.program_trials import processes_of, refusal

from toolroll.rollout.runs.episode_file import read_episodes

KILLS = 20 if FULL else 8


@pytest.mark.faults
@pytest.mark.skipif(bool(refusal()), reason=f"needs user namespaces: {refusal()}")
def test_a_run_that_is_killed_again_and_again_leaves_nothing_and_loses_nothing(
    tmp_path: Path,
) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    out = printed("-m", "support.killed_trials", tmp_path, KILLS, env=env)
    found = json.loads(out.splitlines()[-1])
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
