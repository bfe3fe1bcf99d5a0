"""Runs that environments end, and output that cannot be written: said in one line, and resumed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.commands import lines, run_command, toolroll
from support.patience import PATIENCE
from support.processes import PIPES, TOOLROLL, python

from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, serve_in_thread

GONE = """
import os
from toolroll import Environment, Observation, StepResult

class Gone(Environment):
    tasks = [{"id": f"t-{number}"} for number in range(6)]

    def reset(self, task, seed):
        self.task = task.id
        return Observation([{"role": "user", "content": "Begin."}])

    def step(self, action):
        if self.task == "t-2" and "TEST_GONE" in os.environ:
            os._exit(0)
        return StepResult(reward=1.0, done=True)
"""
ENDED = "gone:Gone: the run did not end by itself, or still goes on: 2 of 6 episodes are recorded"


def test_a_run_that_an_environment_exits_is_said_by_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text(GONE)
    out, env = tmp_path / "out", f"{tmp_path / 'gone.py'}:Gone"
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer())) as engine:
        options = ["--out", out, "--concurrency", 1, "--no-do-nothing"]
        command = run_command(engine.url, *options, env=env)
        done = python("-m", "toolroll", *command, env={**os.environ, "TEST_GONE": "1"})
        assert (done.returncode, lines(out)) == (0, 2)
        for words in (
            ["view", out],
            ["export", out, "--out", tmp_path / "data", "--format", "atif"],
            ["compare", out, out],
            ["regrade", out, "--env", env, "--out", tmp_path / "again"],
        ):
            assert ENDED in toolroll(*words).output, words
        resumed = toolroll(*command)
    assert ENDED in resumed.stdout and lines(out) == 6
    assert "did not end" not in toolroll("view", out).stdout
    assert "running" not in (out / "run.json").read_text()


@pytest.mark.parametrize(
    ("redirected", "status", "said"),
    [
        (">/dev/full", 2, "toolroll: standard output: No space left on device\n"),
        ("| true", 2, "toolroll: standard output was closed by the program that reads it\n"),
        (">&-", 0, ""),
        (">/dev/full 2>&1", 2, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_a_status(
    tmp_path: Path, redirected: str, status: int, said: str
) -> None:
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer())) as engine:
        options = ["--out", tmp_path / "out", "--tasks", "0-3", "--no-do-nothing"]
        words = [*TOOLROLL, *run_command(engine.url, *options)]
        shell = f'set -o pipefail; "$@" {redirected}'
        done = subprocess.run(["bash", "-c", shell, "bash", *words], timeout=PATIENCE, **PIPES)
    assert (done.returncode, done.stderr) == (status, said)
    assert status or lines(tmp_path / "out") == 4
