"""The command line as a process: exit codes, signals, what is left behind, what `toolroll serve`
answers, runs that environments end, output that cannot be written, and what `new-env` writes."""

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError
from support.chat import completion, endpoint
from support.commands import lines, run_command, serve_command, toolroll
from support.patience import PATIENCE
from support.processes import PIPES, TOOLROLL, printed, python, toolroll_serve, wait_until

from toolroll.cli.new_env import new_env
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import EmbeddedEngine, reference_policy, serve_in_thread

LEFT = {
    "thread": "threading.Thread(target=hang, name='left-behind').start()",
    "exit function": "atexit.register(hang)",
    "executor": "concurrent.futures.ThreadPoolExecutor().submit(hang)",
}
ENDED = "the run is not finished: 2 of 6 episodes"


@pytest.mark.parametrize("left", LEFT)
def test_it_ends_although_what_was_left_behind_does_not(left: str) -> None:
    arguments, status = (["run", "nothing"], 2) if left == "exit function" else (["envs"], 0)
    lines = [
        "import atexit, concurrent.futures, threading",
        "from toolroll.cli import app, main",
        "app.EXIT_SECONDS = 0.1",
        "hang = threading.Event().wait",
        LEFT[left],
        "main()",
    ]
    ended = python("-c", "\n".join(lines), *arguments)
    assert ended.returncode == status
    what = "an exit function" if left == "exit function" else "the threads"
    assert f"the process is ended, although {what}" in ended.stderr


def test_what_blocks_for_ever_does_not_keep_the_process() -> None:
    program = """
import asyncio, time
from toolroll.rollout.runtime.threads import Threads
async def main():
    threads = Threads(2)
    try:
        await asyncio.wait_for(threads.run_in_thread(time.sleep, 600), 0.1)
    except TimeoutError:
        print("late", flush=True)
asyncio.run(main())
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")


LEFT_BEHIND = """
import asyncio, sys
from toolroll.rollout.runtime import event_loop
how, kind = sys.argv[1:]
async def leave():
    raise KeyboardInterrupt
def call():
    raise KeyboardInterrupt
async def main():
    loop = asyncio.get_running_loop()
    left = loop.create_task(leave()) if how == "task" else loop.call_soon(call)
    for _ in range(3):
        await asyncio.sleep(0)
    return "went on"
if kind == "asyncio":
    event_loop._loop_factory = lambda: None
print(event_loop.run(main()))
"""


@pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
@pytest.mark.parametrize("how", ["task", "callback"])
def test_an_interrupt_of_code_left_behind_is_not_ctrl_c(how: str, kind: str) -> None:
    """In a fresh process, whose handler of SIGINT is Python's own."""
    done = python("-c", LEFT_BEHIND, how, kind)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


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
async def test_a_wrong_address_of_a_baseline_is_reported(reruns: str) -> None:
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


async def test_it_serves_who_has_the_key(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
import os
from toolroll import Environment, Observation, StepResult

class Short(Environment):
    tasks = [{"id": f"t-{number}"} for number in range(6)]

    def __init__(self, reward: float = 1.0):
        self.reward = reward

    def reset(self, task, seed):
        self.task = task.id
        return Observation([{"role": "user", "content": "Begin."}])

    def step(self, action):
        if self.task == "t-2" and "TEST_GONE" in os.environ:
            os._exit(0)
        return StepResult(reward=self.reward, done=True)
"""


async def test_every_worker_finds_an_environment_of_a_file(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "short.py").write_text(FILE)
    with serve_in_thread(EmbeddedEngine(tokenizer, reference_policy({}))) as engine:
        options = ["--env-args", '{"reward": 0.5}', "--out", "out", "--ray", "local"]
        words = run_command(engine.url, *options, "--processes", 2, env="short.py:Short")
        await asyncio.to_thread(printed, "-m", "toolroll", *words, cwd=tmp_path)
    found = [episode.result.reward for episode in read_episodes(tmp_path / "out")]
    assert found == [0.5] * 6


def test_a_run_that_an_environment_exits_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "short.py").write_text(FILE)
    out, env = tmp_path / "out", f"{tmp_path / 'short.py'}:Short"
    with serve_in_thread(EmbeddedEngine(tokenizer)) as engine:
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
    assert "2 episodes are in" in resumed.stdout and lines(out) == 6
    assert "not finished" not in toolroll("view", out).stdout


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
    tmp_path: Path, tokenizer: Any, redirected: str, status: int, said: str
) -> None:
    with serve_in_thread(EmbeddedEngine(tokenizer)) as engine:
        options = ["--out", tmp_path / "out", "--tasks", "0-3", "--no-do-nothing"]
        words = [*TOOLROLL, *run_command(engine.url, *options)]
        shell = f'set -o pipefail; "$@" {redirected}'
        done = subprocess.run(["bash", "-c", shell, "bash", *words], timeout=PATIENCE, **PIPES)
    assert (done.returncode, done.stderr) == (status, said)
    assert status or lines(tmp_path / "out") == 4


def test_what_new_env_writes_is_short_and_passes_its_checks(tmp_path: Path) -> None:
    done = toolroll("new-env", "heat-pump", "--at", tmp_path)
    assert done.exit_code == 0, done.output
    file, test = tmp_path / "heat_pump.py", "test_heat_pump.py"
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, test]
    text = file.read_text()
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 100
    assert "@" not in text
    ours = ("PYTEST", "PYTHONPATH")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    tested = python(*command, cwd=tmp_path, env=plain)
    assert "3 passed" in tested.stdout, tested.stdout + tested.stderr
    typed = python("-m", "mypy", "--strict", file.name, test, cwd=tmp_path, env=plain)
    assert typed.returncode == 0, typed.stdout + typed.stderr
    checked = toolroll("check-env", f"{file}:env")
    assert checked.exit_code == 0, checked.output
    assert "references earn 1.0: 2 of 2" in checked.stdout
    with pytest.raises(UsageError, match=r"heat_pump.py already exists"):
        new_env("heat-pump", tmp_path)


REFUSED = {
    "lowercase letters": ["Heat", "heat_pump", "../x", "heat--pump", ""],
    "an existing module": ["class", "json", "pytest"],
    "an environment named 'desk' already": ["desk"],
}


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for words, names in REFUSED.items() for name in names]
)
def test_names_of_new_env_that_cannot_be_are_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        new_env(name, tmp_path)
    assert list(tmp_path.iterdir()) == []
