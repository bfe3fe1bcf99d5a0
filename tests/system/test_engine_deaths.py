"""The engine is killed with SIGKILL in the middle of a run: it comes back, or it does not."""

import json
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.commands import lines
from support.faults.size import FULL
from support.faults.tally import Tally
from support.patience import PATIENCE
from support.processes import PIPES, TOOLROLL, answers, free_ports, kill_group, wait_until

from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.registry import find_environment

pytestmark = pytest.mark.faults

SAMPLES = 7 if FULL else 3
EPISODES = 33 * SAMPLES
DOWN = 60.0 if FULL else 0.0
"""Seconds for which the engine stays away."""
PROCESSES = pytest.mark.parametrize("processes", [1, 2] if FULL else [2])
"""`tests/unit/engine/test_outage.py` and `tests/unit/cli/test_outage.py` have one process."""


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


def check(folder: Path, tally: Tally, run: Run) -> None:
    """Every episode is there once, none was aborted, and none was played again."""
    episodes = list(read_episodes(folder))
    tasks = find_environment("desk").tasks("test")
    tally.tried()
    tally.texts(*run.errors)
    tally.played(episodes, [(task.id, n) for task in tasks for n in range(SAMPLES)], {})
    tally.check()
    statuses = Counter(str(episode.result.status) for episode in episodes)
    assert "aborted" not in statuses, statuses
    assert {episode.result.metrics["reruns"] for episode in episodes} == {0.0}
    found: Any = json.loads((folder / "summary.json").read_text())["environments"]["desk"]
    assert (found["episodes"], found["aborted"]) == (EPISODES, 0)


@PROCESSES
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
    assert 10 <= before < EPISODES
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
    check(tmp_path, tally, run)
