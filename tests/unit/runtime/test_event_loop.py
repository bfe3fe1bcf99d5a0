"""The commands' event loop: uvloop's if it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest
import uvloop
from support.patience import PATIENCE
from support.scripted_runs import AsyncScripted, ScriptedFactory, Talker, play
from typer.testing import CliRunner

from toolroll.cli.app import app
from toolroll.rollout.environment import Task
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import RolloutError, first_error
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runtime import event_loop
from toolroll.rollout.runtime.event_loop import run
from toolroll.rollout.runtime.foreign import retrieve
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import RunSettings


async def loop_kind() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_uvloop_if_it_is_installed() -> None:
    assert run(loop_kind()) is uvloop.Loop


def test_asyncios_own_if_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "uvloop")
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    kind = run(loop_kind())
    assert kind is not uvloop.Loop and issubclass(kind, asyncio.SelectorEventLoop)


def exits(how: str) -> None:
    """End the event loop from a task or a callback that is not `main`."""
    loop = asyncio.get_running_loop()

    async def leave(kind: type[BaseException]) -> None:
        raise kind(0)

    def call(kind: type[BaseException]) -> None:
        raise kind(0)

    if how == "stop":
        loop.stop()
    elif how.startswith("task"):
        left = loop.create_task(leave(EXITS[how.split()[1]]))
        left.add_done_callback(retrieve)
        exits.kept = left  # type: ignore[attr-defined]
    else:
        loop.call_soon(call, EXITS[how.split()[1]])


EXITS = {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}
WAYS = ["stop", *(f"{kind} {error}" for kind in ("task", "callback") for error in EXITS)]


@pytest.fixture(params=["uvloop", "asyncio"])
def loop_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "asyncio":
        monkeypatch.setattr(event_loop, "_loop_factory", lambda: None)
    return str(request.param)


def leaving(how: str) -> ScriptedFactory:
    """Each step of its fifth environment ends the event loop, if anything does."""

    async def act(name: str, task: Task) -> None:
        if name == "step" and task.id == "t-4":
            exits(how)

    return ScriptedFactory(lambda: AsyncScripted(act), count=24)


@pytest.mark.parametrize("suppresses", [False, True])
def test_ctrl_c_cancels_main_and_a_second_one_ends_it(suppresses: bool, loop_of: str) -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGINT)
        if suppresses:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(PATIENCE)
            # not in `main`, which would end by it
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(PATIENCE)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize("how", WAYS)
def test_a_run_outlives_what_an_environment_leaves_on_the_loop(
    how: str, loop_of: str, caplog: pytest.LogCaptureFixture
) -> None:
    handled = signal.signal(signal.SIGINT, lambda *_: None)  # as during a run: Ctrl-C is handled
    try:
        episodes = run(play(leaving(how)))
    finally:
        signal.signal(signal.SIGINT, handled)
    assert [episode.result.reward for episode in episodes] == [1.0] * 24
    assert "code that was left behind on the event loop ended it" in caplog.text


def test_under_asyncio_run_a_run_that_is_cut_short_says_so() -> None:
    """The loop is the caller's, so that the run cannot continue."""
    with pytest.raises(SystemExit) as ended:
        asyncio.run(play(leaving("task SystemExit")))
    words = r"\d+ of 24 episodes were not played, .*code on the event loop"
    assert re.search(words, str(ended.value.code))


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError])
async def test_a_function_that_stores_and_exits_is_an_error(kind: type[BaseException]) -> None:
    def store(episode: Episode) -> None:
        raise kind

    factory, calls = ScriptedFactory(lambda: AsyncScripted(lambda *_: None), count=4), Threads(1)
    runner = Runner(factory, lambda: Talker(calls), RunSettings(concurrency=2))
    with pytest.raises(ExceptionGroup) as group:
        await runner.run(factory.tasks("test"), store)
    assert isinstance(first_error(group.value), RolloutError)


def test_the_loop_closes_although_tasks_do_not_end(
    loop_of: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "LEAVE_SECONDS", 0.01)
    free = threading.Event()

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def main() -> None:
        main.left = asyncio.create_task(stubborn())  # type: ignore[attr-defined]
        asyncio.get_running_loop().run_in_executor(None, free.wait)
        await asyncio.sleep(0)

    try:
        run(main())
    finally:
        free.set()
    assert "1 tasks on the event loop did not end when cancelled" in caplog.text


def test_serve_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type[asyncio.AbstractEventLoop]] = []

    async def serve(*args: Any) -> None:
        kinds.append(await loop_kind())

    monkeypatch.setattr("toolroll.endpoint.http.serve.serve", serve)
    result = CliRunner().invoke(app, ["serve", "--model", "embedded"])
    assert (result.exit_code, kinds) == (0, [uvloop.Loop])


def test_environments_whose_threads_hang_take_no_others() -> None:
    free = threading.Event()

    async def act(method: str, task: Task) -> None:
        if method == "step":
            await asyncio.gather(asyncio.to_thread(free.wait, PATIENCE))

    async def main() -> tuple[list[Episode], str]:
        factory = ScriptedFactory(lambda: AsyncScripted(act), count=110)
        episodes = await play(factory, step_timeout=0.05, concurrency=20)
        return episodes, await asyncio.to_thread(lambda: threading.current_thread().name)

    try:
        episodes, thread = run(main())
    finally:
        free.set()
    assert thread.startswith("toolroll-loop")
    reasons = Counter(str(episode.result.stop_reason) for episode in episodes)
    assert reasons.keys() == {"time_limit", "environment_error"}
    assert 64 <= reasons["time_limit"] < 110
    errors = [episode.result.info["error"]["message"] for episode in episodes]
    message = r"calls of asyncio.to_thread exceeded their time limit .*AsyncScripted.step of t-"
    refused = [error for error in errors if re.search(message, error)]
    assert len(refused) == reasons["environment_error"]


def test_an_environment_has_own_threads_while_it_runs() -> None:
    names: list[str] = []

    async def act(method: str, task: Task) -> None:
        names.append(await asyncio.to_thread(lambda: threading.current_thread().name))

    async def main() -> str:
        await play(ScriptedFactory(lambda: AsyncScripted(act), count=3), concurrency=3)
        return await asyncio.to_thread(lambda: threading.current_thread().name)

    assert run(main()).startswith("toolroll-loop")
    assert names and all(name.startswith("environment") for name in names)
