"""The command line as a process: exit codes, signals, and what `toolroll serve` answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.chat import completion, endpoint
from support.commands import holding, lines, run_command
from support.patience import PATIENCE
from support.processes import serving
from support.tiny_llama import write_tiny_llama

from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import EmbeddedEngine, PolicyRequest, reference_policy, serve_in_thread

MAIN = "from toolroll.cli import main; main()"


LEFT_BEHIND = {
    "thread": "threading.Thread(target=hang, name='left-behind').start()",
    "exit function": "atexit.register(hang)",
    "executor": "concurrent.futures.ThreadPoolExecutor().submit(hang)",
}


@pytest.mark.parametrize("left", LEFT_BEHIND)
def test_it_ends_although_what_an_environment_left_behind_does_not(left: str) -> None:
    arguments, status = (["run", "nothing"], 2) if left == "exit function" else (["envs"], 0)
    lines = [
        "import atexit, concurrent.futures, threading",
        "from toolroll.cli import app, main",
        "app.EXIT_SECONDS = 0.1",
        "hang = threading.Event().wait",
        LEFT_BEHIND[left],
        "main()",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == status
    what = "an exit function" if left == "exit function" else "the threads"
    assert f"the process is ended, although {what}" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_gracefully(
    tmp_path: Path, tokenizer: Any, number: signal.Signals
) -> None:
    stuck: list[PolicyRequest] = []
    with serve_in_thread(EmbeddedEngine(tokenizer, holding(stuck))) as engine:
        words = run_command(engine.url, "--tasks", "0-5", "--out", tmp_path)
        command = [sys.executable, "-c", MAIN, *words]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        ) as process:
            deadline = time.monotonic() + PATIENCE
            while (len(stuck) < 3 or lines(tmp_path) < 3) and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
            out, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 128 + number, errors
        assert "Traceback" not in errors
        assert "Stopped early; the same command continues from here." in out
        assert "the run is not finished: 3 of 6 episodes" in out
        assert sorted(found.task_index for found in read_episodes(tmp_path)) == [0, 1, 2]
        assert [
            (found.result.status, found.result.info)
            for found in read_episodes(tmp_path)
            if not found.result.reward
        ] == []
        assert sum(entry.aborted for entry in engine.log) == 3, "they are aborted at the engine"
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert "desk: 3 episodes are in" in done.stdout
        assert sorted(found.task_index for found in read_episodes(tmp_path)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("reruns", ["0", "2"])
async def test_a_baseline_that_is_never_graded_ends_with_1_and_its_wrong_address_is_said(
    reruns: str,
) -> None:
    async with endpoint(completion("Hello.")) as server:
        words = f"run desk --model embedded --tasks 0-1 --reruns {reruns} --give-up-after 3"
        command = [sys.executable, "-c", MAIN, *words.split()]
        command += ["--baseline-url", server.url.removesuffix("/v1")]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        out, errors = (part.decode() for part in await process.communicate())
    assert "answers 404: does the address end in /v1?)" in out + errors
    if reruns == "2":
        assert (
            process.returncode,
            "toolroll: 3 attempts at episodes failed in a row" in errors,
        ) == (2, True)
        return
    assert process.returncode == 1
    assert "desk: no episode has a reward. The last aborted episode: http://127.0.0.1" in out
    assert "WARNING: 2 of 2 episodes were aborted and excluded from rewards: engine_error 2" in out


def test_a_stopped_demo_begins_no_further_environment(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAIN, *"demo --samples 2 --out".split()]
    command += [str(tmp_path / "demo")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + PATIENCE
        file = tmp_path / "demo" / "episodes.jsonl"
        while not (file.is_file() and file.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "(desk-1m)" in out
    assert "(references)" not in out
    assert "Stopped early." in out
    assert "continues from here" not in out


async def test_it_serves_until_it_is_told_to_stop(tokenizer: Any) -> None:
    async with EmbeddedEngine(tokenizer, lambda request: "Hello.") as engine:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from toolroll.cli import main; main()",
            "serve", "--model", "embedded", "--engine", engine.url, "--port", "0",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode()
            url = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert url, line
            async with AsyncOpenAI(
                base_url=f"{url.group()}/sessions/s/v1", api_key="unused"
            ) as client:
                reply = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "Hi"}]
                )
            assert reply.choices[0].message.content == "Hello."
        finally:
            process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), PATIENCE)
        assert code == 0


FILE = """
from toolroll import Environment, Observation, StepResult

class Waiter(Environment):
    tasks = [{"line": str(at)} for at in range(4)]

    def __init__(self, reward: float):
        self.reward = reward

    def reset(self, task, seed):
        return Observation([{"role": "user", "content": task.data["line"]}])

    def step(self, action):
        return StepResult(reward=self.reward, done=True)
"""


async def test_an_environment_of_a_file_is_found_by_every_worker(
    tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / "wait.py").write_text(FILE)
    with serve_in_thread(EmbeddedEngine(tokenizer, reference_policy({}))) as engine:
        command = [sys.executable, "-c", MAIN, "run", "wait.py:Waiter", "--engine", engine.url]
        command += ["--model", "embedded", "--env-args", '{"reward": 0.5}', "--out", "out"]
        command += "--ray local --processes 2".split()
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
        )
    assert done.returncode == 0, done.stderr
    found = [episode.result.reward for episode in read_episodes(tmp_path / "out")]
    assert found == [0.5] * 4


def test_the_engine_serves_a_model(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "llama")
    command = lambda port: [
        *(sys.executable, "-c", MAIN, "engine", "--port", str(port)),
        *("--model", str(folder), "--context-length", "512"),
    ]
    body = json.dumps({"input_ids": [300], "sampling_params": {"max_new_tokens": 4}}).encode()
    with serving(
        command, ready="/health", environment={}, log=tmp_path / "log", name="the embedded engine"
    ) as server:
        request = urllib.request.Request(
            f"{server.url}/generate", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert len(json.loads(response.read())["output_ids"]) == 4
        with urllib.request.urlopen(f"{server.url}/server_info", timeout=PATIENCE) as response:
            assert json.loads(response.read())["context_length"] == 512
