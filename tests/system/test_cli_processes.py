"""The command line as a process: exit codes, signals, and what `toolroll serve` answers."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError
from support.chat import completion, endpoint
from support.commands import holding, lines, run_command, serve_command
from support.patience import PATIENCE
from support.processes import (
    PIPES,
    TOOLROLL,
    get_json,
    printed,
    python,
    serving,
    toolroll_serve,
    wait_until,
)
from support.tiny_llama import write_tiny_llama

from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import EmbeddedEngine, PolicyRequest, reference_policy, serve_in_thread

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
    ended = python("-c", "\n".join(lines), *arguments)
    assert ended.returncode == status
    what = "an exit function" if left == "exit function" else "the threads"
    assert f"the process is ended, although {what}" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_gracefully(
    tmp_path: Path, tokenizer: Any, number: signal.Signals
) -> None:
    stuck: list[PolicyRequest] = []
    with serve_in_thread(EmbeddedEngine(tokenizer, holding(stuck))) as engine:
        command = [*TOOLROLL, *run_command(engine.url, "--tasks", "0-5", "--out", tmp_path)]
        with subprocess.Popen(command, **PIPES) as process:
            wait_until(lambda: len(stuck) == 3 and lines(tmp_path) >= 3)
            process.send_signal(number)
            out, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 128 + number, errors
        assert "Traceback" not in errors
        assert "Stopped early; the same command continues from here." in out
        assert "the run is not finished: 3 of 6 episodes" in out
        assert sorted(found.task_index for found in read_episodes(tmp_path)) == [0, 1, 2]
        results = [found.result for found in read_episodes(tmp_path)]
        assert [(each.status, each.info) for each in results if not each.reward] == []
        assert sum(entry.aborted for entry in engine.log) == 3, "they are aborted at the engine"
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert "desk: 3 episodes are in" in done.stdout
        assert sorted(found.task_index for found in read_episodes(tmp_path)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_waits_for_the_engine_is_told(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        command = [*TOOLROLL, *run_command(f"http://127.0.0.1:{silent.getsockname()[1]}")]
        with subprocess.Popen(command, **PIPES) as process:
            asking, _ = silent.accept()
            with asking:
                process.send_signal(number)
                out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, errors
    assert "Stopped while waiting; the same command continues from here." in out
    assert "Traceback" not in errors


@pytest.mark.parametrize("reruns", ["0", "2"])
async def test_a_baseline_that_is_never_graded_ends_with_1_and_its_wrong_address_is_said(
    reruns: str,
) -> None:
    async with endpoint(completion("Hello.")) as server:
        words = f"run desk --model embedded --tasks 0-1 --reruns {reruns} --give-up-after 3"
        command = ["-m", "toolroll", *words.split()]
        command += ["--baseline-url", server.url.removesuffix("/v1")]
        done = await asyncio.to_thread(python, *command)
    out, errors = done.stdout, done.stderr
    assert "answers 404: does the address end in /v1?)" in out + errors
    if reruns == "2":
        assert done.returncode == 2
        assert "toolroll: 3 attempts at episodes failed in a row" in errors
        return
    assert done.returncode == 1
    assert "desk: no episode has a reward. The last aborted episode: http://127.0.0.1" in out
    assert "WARNING: 2 of 2 episodes were aborted and excluded from rewards: engine_error 2" in out


def test_a_stopped_demo_begins_no_further_environment(tmp_path: Path) -> None:
    command = [*TOOLROLL, *"demo --samples 2 --out".split(), str(tmp_path / "demo")]
    with subprocess.Popen(command, **PIPES) as process:
        wait_until(lambda: lines(tmp_path / "demo"))
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "(desk-1m)" in out
    assert "(references)" not in out
    assert "Stopped early." in out
    assert "continues from here" not in out


async def test_it_serves_who_has_the_key_until_it_is_told_to_stop(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_ENDPOINT", "a-secret-key")
    body: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    async with EmbeddedEngine(tokenizer, lambda request: "Hello.") as engine:
        command = serve_command(engine.url, "--api-key-env", "KEY_OF_THE_ENDPOINT")
        async with (
            toolroll_serve(command) as url,
            AsyncOpenAI(base_url=f"{url}/sessions/s/v1", api_key="a-secret-key") as client,
        ):
            with pytest.raises(AuthenticationError):
                await client.with_options(api_key="other").chat.completions.create(**body)
            reply = await client.chat.completions.create(**body)
        assert reply.choices[0].message.content == "Hello."


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
        options = ["--env-args", '{"reward": 0.5}', "--out", "out", "--ray", "local"]
        words = run_command(engine.url, *options, "--processes", 2, env="wait.py:Waiter")
        await asyncio.to_thread(printed, "-m", "toolroll", *words, cwd=tmp_path)
    found = [episode.result.reward for episode in read_episodes(tmp_path / "out")]
    assert found == [0.5] * 4


def test_the_engine_serves_a_model(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "llama")
    options = ("--model", str(folder), "--context-length", "512")
    command = lambda port: [*TOOLROLL, "engine", "--port", str(port), *options]
    body = json.dumps({"input_ids": [300], "sampling_params": {"max_new_tokens": 4}}).encode()
    with serving(
        command, ready="/health", environment={}, log=tmp_path / "log", name="the embedded engine"
    ) as server:
        request = urllib.request.Request(
            f"{server.url}/generate", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert len(json.loads(response.read())["output_ids"]) == 4
        assert get_json(f"{server.url}/server_info")[1]["context_length"] == 512
