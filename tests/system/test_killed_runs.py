"""`kill -9` of a run at any moment loses nothing, doubles nothing, and leaves nothing running. And
of the engine, which comes back, or does not."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.commands import lines
from support.faults.size import FULL
from support.faults.tally import Tally, contents
from support.killed_run import MARKER, TURNS
from support.patience import PATIENCE
from support.processes import PIPES, TOOLROLL, answers, free_ports, kill_group, python, wait_until
from support.program_trials import processes_of, refusal

from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.registry import find_environment

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


# --- the engine is killed -------------------------------------------------------------------------

SAMPLES = 7 if FULL else 3
DOWN = 60.0 if FULL else 0.0
"""Seconds for which the engine stays away."""


@contextmanager
def engine(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The embedded engine as a process of its own, which answers after 20 ms."""
    command = [*TOOLROLL, "engine", "--port", str(port), "--latency", "0.02"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield process
    finally:
        kill_group(process)


class Run:
    """`toolroll run` under way; `errors` are the lines on its standard error so far."""

    def __init__(self, port: int, out: Path, *options: str) -> None:
        url = f"http://127.0.0.1:{port}"
        words = f"run desk --model embedded --no-do-nothing --samples {SAMPLES} --max-turns 8"
        command = [*TOOLROLL, *words.split(), "--concurrency", "16", "--engine", url]
        pipes: Any = {**PIPES, "stdout": subprocess.DEVNULL}
        self.errors: list[str] = []
        self.process = subprocess.Popen([*command, "--out", str(out), *options], **pipes)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.errors += iter(self.process.stderr.readline, "")

    def says(self, words: str) -> bool:
        return any(words in line for line in list(self.errors))

    def ended(self) -> int:
        """The exit status."""
        try:
            return self.process.wait(timeout=PATIENCE)
        finally:
            self.process.kill()


# With one process: tests/unit/engine/test_outage.py and tests/unit/cli/test_outage.py.
@pytest.mark.parametrize("processes", [1, 2] if FULL else [2])
def test_a_run_without_engine_is_continued(processes: int, tmp_path: Path, tally: Tally) -> None:
    [port] = free_ports(1)
    options = ("--processes", str(processes))
    with engine(port) as first:
        run = Run(port, tmp_path, *options, "--engine-timeout", "0.5")
        wait_until(lambda: lines(tmp_path) >= 10)
        first.send_signal(signal.SIGKILL)
        assert run.ended() == 2, run.errors
    assert len([line for line in run.errors if line.startswith("toolroll: ")]) == 1
    assert run.says("has not answered for 0.5 s") and run.says("continues from there.")
    own = [line for line in run.errors if "(raylet)" not in line]
    assert len(own) <= 1 + processes, own
    before = lines(tmp_path)
    assert 10 <= before < 33 * SAMPLES
    with engine(port) as second:
        run = Run(port, tmp_path, *options)
        wait_until(lambda: lines(tmp_path) >= before + 10)
        second.send_signal(signal.SIGKILL)
        wait_until(lambda: run.says("does not answer"))
        time.sleep(DOWN)
    with engine(port):
        assert run.ended() == 0, run.errors
    waited = [line for line in run.errors if "waiting for it, up to 600 s" in line]
    assert 1 <= len(waited) <= processes
    episodes = list(read_episodes(tmp_path))
    tasks = find_environment("desk").tasks("test")
    tally.tried()
    tally.texts(*run.errors)
    tally.played(episodes, [(task.id, n) for task in tasks for n in range(SAMPLES)], {})
    tally.check()
    assert {episode.result.metrics["reruns"] for episode in episodes} == {0.0}
    summary: Any = json.loads((tmp_path / "summary.json").read_text())["environments"]["desk"]
    assert (summary["episodes"], summary["aborted"]) == (33 * SAMPLES, 0)
