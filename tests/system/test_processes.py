"""A run spread over processes: no episode is lost or doubled, whichever process dies."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import worker_factories
from support.commands import holding, lines, run_command
from support.faults.size import FULL
from support.faults.tally import Tally, contents
from support.patience import PATIENCE
from support.processes import PIPES, TOOLROLL, wait_until
from support.ray_processes import desk_engine, desk_run, local_cluster, workers
from support.results import content
from support.toy_environment import PondFactory, look

from toolroll.cli.run_command import run
from toolroll.evaluation import ray_worker
from toolroll.evaluation.ray_runner import RayRunner
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.runs.runner import Runner, RunStoppedError
from toolroll.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer, serve_in_thread

SAMPLES = worker_factories.SAMPLES
SIGNALS = [
    (1, signal.SIGINT),
    (1, signal.SIGTERM),
    *([(2, signal.SIGINT)] if FULL else []),
    (2, signal.SIGTERM),
    (2, signal.SIGKILL),
]
Key = tuple[str, int]


def failing(error: BaseException) -> Any:
    return partial(worker_factories.open_and_raise, error)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster():
        yield


@pytest.fixture(scope="module")
def ponds(cluster: None) -> Iterator[EmbeddedEngine]:
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), look, latency=0.01)) as served:
        yield served


async def played(opened: Any, count: int, processes: int = 2, **more: Any) -> dict[Key, Any]:
    found: list[Episode] = []
    runner = RayRunner(opened, processes=processes, concurrency=8, samples=SAMPLES)
    await runner.run(PondFactory(count).tasks("test"), found.append, **more)
    assert len({(one.task_id, one.sample) for one in found}) == len(found), "none twice"
    return {(one.task_id, one.sample): content(one, circumstances=False) for one in found}


async def test_the_episodes_are_those_of_one_process(ponds: EmbeddedEngine) -> None:
    opened = partial(worker_factories.open_ponds, ponds.url, 12)
    alone: list[Episode] = []
    async with AsyncExitStack() as stack:
        runner, tasks = await opened(8, stack)
        assert isinstance(runner, Runner)
        await runner.run(tasks, alone.append)
    assert len(alone) == 12 * SAMPLES
    expected = {(one.task_id, one.sample): content(one, circumstances=False) for one in alone}
    assert await played(opened, 12) == expected
    done = {key for key in expected if key[1] != 1}
    assert await played(opened, 12, done=done) == {
        key: value for key, value in expected.items() if key not in done
    }


async def test_nothing_to_do_starts_nothing() -> None:
    done = {(f"t-{number}", sample) for number in range(2) for sample in range(SAMPLES)}
    assert await played(failing(KeyError("model")), 2, done=done) == {}


async def test_info_that_cannot_be_sent_comes_in_words(ponds: EmbeddedEngine) -> None:
    found = await played(partial(worker_factories.open_with_odd_info, ponds.url, 2), 2)
    assert len(found) == 2 * SAMPLES
    for one in found.values():
        assert one["info"]["looks"] == 7
        assert "lock" in one["info"]["lock"]
        assert one["info"]["env/error"] == "Needy('no')"


@pytest.mark.parametrize(
    ("opened", "error", "words"),
    [
        (failing(UsageError("there is no such model")), UsageError, "^there is no such model$"),
        (failing(KeyError("model")), RolloutError, r"^a worker failed: KeyError\('model'\)$"),
        (worker_factories.open_and_raise_a_lock, RolloutError, "^it holds a lock$"),
        (
            failing(asyncio.CancelledError()),
            RolloutError,
            "^the call was cancelled in its process$",
        ),
        (worker_factories.open_and_stop, RunStoppedError, "^ten failed in a row$"),
    ],
)
async def test_an_error_keeps_its_words(cluster: None, opened: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        await played(opened, 2)


@pytest.mark.parametrize("what", ["stop", "fork and die"])
async def test_a_process_that_does_not_respond_is_replaced(
    ponds: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Also one that died and whose connections are still open, in a process that it forked."""
    monkeypatch.setattr(ray_worker, "_STALL", 10.0)  # a busy machine may need some seconds
    mark = tmp_path / "mark"
    opened = partial(worker_factories.open_and_suffer, ponds.url, 12, mark, what)
    try:
        found = await played(opened, 12)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(mark.read_text()), signal.SIGKILL)
    assert len(found) == 12 * SAMPLES


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="the extra `ray` of toolroll"):
        RayRunner(failing(KeyError("model")), processes=2, concurrency=2, samples=1)


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError])
async def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch: Any, error: Any) -> None:
    """With each error that Ray has for it. Ray itself tries for minutes."""

    def refuse(**options: Any) -> None:
        raise error("no answer")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(UsageError, match=r"^cannot connect to Ray at 127\.0\.0\.1:1: no answer$"):
        async with ray_worker.connected("127.0.0.1:1", 2):
            raise AssertionError("connected")


@pytest.fixture(scope="module")
def desk() -> Iterator[EmbeddedEngine]:
    with desk_engine(samples=1, latency=0.1) as served:
        yield served


@pytest.mark.faults
async def test_a_process_that_is_killed_loses_and_doubles_nothing(
    desk: EmbeddedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, tally: Tally
) -> None:
    console = Console(quiet=True)
    await run(desk_run(desk, tmp_path / "one"), console)
    running = asyncio.create_task(run(desk_run(desk, tmp_path / "two", processes=2), console))
    while not running.done() and lines(tmp_path / "two") < 8:
        await asyncio.sleep(0.02)
    before = lines(tmp_path / "two")
    children = workers()
    os.kill(children[0], signal.SIGKILL)
    outcome = await running
    assert len(children) == 2
    assert 8 <= before < 33, "it died in mid-run"
    assert "died (attempt 1)" in caplog.text, "it played"
    assert (outcome.summary.episodes, outcome.report["aborted"]) == (33, 0)
    whole = contents(read_episodes(tmp_path / "one"))
    tally.tried()
    tally.played(list(read_episodes(tmp_path / "two")), whole, whole)
    tally.check()
    assert workers() == []


def command(engine: EmbeddedEngine, out: Path, processes: int = 2) -> list[str]:
    options = f"--tasks 0-5 --processes {processes} --concurrency 6 --no-do-nothing --out".split()
    return [*TOOLROLL, *run_command(engine.url, *options, out)]


@pytest.mark.parametrize("seconds", [0.02, 3.0])
def test_a_signal_while_they_start_is_no_traceback(tmp_path: Path, seconds: float) -> None:
    with (
        serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), holding([]))) as engine,
        subprocess.Popen(command(engine, tmp_path), **PIPES, start_new_session=True) as process,
    ):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(children.read_text, pause=0.005)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "Traceback" not in errors


@pytest.mark.faults
@pytest.mark.parametrize(("processes", "number"), SIGNALS, ids=str)
def test_a_signal_ends_the_run_and_nothing_stays_at_the_engine(
    tmp_path: Path, processes: int, number: signal.Signals, tally: Tally
) -> None:
    """A scheduler signals all of them; one that is killed cannot tell the others."""
    stuck: list[PolicyRequest] = []
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), holding(stuck))) as engine:
        words = command(engine, tmp_path, processes)
        with subprocess.Popen(words, **PIPES, start_new_session=True) as process:
            wait_until(lambda: len(stuck) == 3 and lines(tmp_path) >= 3)
            if number == signal.SIGKILL:
                process.kill()
            else:
                os.killpg(process.pid, number)
            # ends when the last one that writes there is gone
            out, errors = process.communicate(timeout=PATIENCE)
        assert "Traceback" not in errors
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number, errors
            assert "Stopped early; the same command continues from here." in out
            assert "the run is not finished: 3 of 6 episodes" in out
            finished = {found.task_index: found.result for found in read_episodes(tmp_path)}
            assert sorted(finished) == [0, 1, 2]
            assert [each.info for each in finished.values() if not each.reward] == []
        # they are aborted at the engine: Ray ends the processes of a command that is gone
        wait_until(lambda: sum(entry.aborted for entry in engine.log) == 3)
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert "desk: 3 episodes are in" in done.stdout
        tally.tried()
        tally.texts(out, errors)
        tasks = find_environment("desk").tasks("test")[:6]
        tally.played(list(read_episodes(tmp_path)), [(task.id, 0) for task in tasks], {})
        tally.check()
