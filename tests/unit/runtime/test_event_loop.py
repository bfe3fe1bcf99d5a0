"""The commands' event loop: uvloop's if it is installed, else asyncio's own. What is left on it
does not end a run, and a call that blocks it is named.
"""

import asyncio
import contextlib
import logging
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

from toolroll import Episode, Runner, RunSettings, Task
from toolroll.cli.app import app
from toolroll.rollout.errors import RolloutError, first_error
from toolroll.rollout.runtime import blocked_loop, event_loop
from toolroll.rollout.runtime.blocked_loop import watched_loop
from toolroll.rollout.runtime.event_loop import run
from toolroll.rollout.runtime.foreign import retrieve
from toolroll.rollout.runtime.threads import Threads


async def loop_kind() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_uvloop_or_asyncios_own_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(loop_kind()) is uvloop.Loop
    monkeypatch.delitem(sys.modules, "uvloop")
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    kind = run(loop_kind())
    assert kind is not uvloop.Loop and issubclass(kind, asyncio.SelectorEventLoop)


def exits(how: str, error: type[BaseException]) -> None:
    """End the event loop from a task or a callback that is not `main`."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        raise error(0)

    async def leave() -> None:
        call()

    if how == "stop":
        loop.stop()
    elif how == "callback":
        loop.call_soon(call)
    else:
        left = loop.create_task(leave())
        left.add_done_callback(retrieve)
        exits.kept = left  # type: ignore[attr-defined]


EXITS = (SystemExit, KeyboardInterrupt)
WAYS = [("stop", SystemExit), *((how, error) for how in ("task", "callback") for error in EXITS)]


@pytest.fixture(params=["uvloop", "asyncio"])
def loop_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "asyncio":
        monkeypatch.setattr(event_loop, "_loop_factory", lambda: None)
    return str(request.param)


def leaving(how: str, error: type[BaseException]) -> ScriptedFactory:
    """Each step of its fifth environment ends the event loop, if anything does."""

    async def act(name: str, task: Task) -> None:
        if name == "step" and task.id == "t-4":
            exits(how, error)

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


@pytest.mark.parametrize(("how", "error"), WAYS)
def test_a_run_outlives_an_ended_loop(how: str, error: Any, loop_of: str, caplog: Any) -> None:
    handled = signal.signal(signal.SIGINT, lambda *_: None)  # as during a run: Ctrl-C is handled
    try:
        episodes = run(play(leaving(how, error)))
    finally:
        signal.signal(signal.SIGINT, handled)
    assert [episode.result.reward for episode in episodes] == [1.0] * 24
    assert "code that was left behind on the event loop ended it" in caplog.text


def test_under_asyncio_run_a_run_that_is_cut_short_says_so() -> None:
    """The loop is the caller's, so that the run cannot continue."""
    words = r"\d+ of 24 episodes were not played, .*code on the event loop"
    with pytest.raises(SystemExit, match=words):
        asyncio.run(play(leaving("task", SystemExit)))


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError])
async def test_a_function_that_stores_and_exits_is_an_error(kind: type[BaseException]) -> None:
    def store(episode: Episode) -> None:
        raise kind

    factory, calls = ScriptedFactory(lambda: AsyncScripted(lambda *_: None), count=4), Threads(1)
    runner = Runner(factory, lambda: Talker(calls), RunSettings(concurrency=2))
    with pytest.raises(ExceptionGroup) as group:
        await runner.run(factory.tasks("test"), store)
    assert isinstance(first_error(group.value), RolloutError)


def test_the_loop_closes_although_a_task_stays(loop_of: str, monkeypatch: Any, caplog: Any) -> None:
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


# --- a call that blocks the event loop is named in a warning, while it still runs -----------------


class Warned(logging.Handler):
    """Keeps the messages; `event` is set by each one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.event.set()

    def block(self) -> None:
        """Block this thread until a message arrives."""
        assert self.event.wait(PATIENCE)
        self.event.clear()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Warned:
    handler = Warned()
    monkeypatch.setattr(blocked_loop.logger, "handlers", [handler])
    return handler


async def test_each_blocking_call_is_named_once_with_its_line(warned: Warned) -> None:
    """A callback has no name."""
    done = asyncio.Event()

    async def call() -> None:
        warned.block()
        assert not warned.event.wait(0.2)  # there is no second message

    def callback() -> None:
        warned.block()
        done.set()

    with watched_loop(seconds=0.05):
        for number in range(2):
            await asyncio.create_task(call(), name=f"Pond.step of t-{number}")
        asyncio.get_running_loop().call_soon(callback)
        await done.wait()
    for message, name in zip(
        warned.messages, ("Pond.step of t-0", "Pond.step of t-1", "a callback"), strict=True
    ):
        assert message.startswith(
            f"{name} has blocked the event loop for 0.05 s (threading.py, line "
        )
        assert "it must await, or run blocking code in a thread" in message


async def test_a_loop_without_a_processor(warned: Warned, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 0.04, 1.0, 1.05, 2.0, 2.001])
    monkeypatch.setattr(blocked_loop, "_waited", lambda thread: next(readings, 2.001))
    looked = threading.Event()
    monkeypatch.setattr(blocked_loop, "_warn", lambda *given: looked.set())
    with watched_loop(seconds=0.05):
        warned.block()
        await asyncio.sleep(0)
        while not looked.is_set():  # the third time, the loop had a processor
            looked.wait(0.2)
            await asyncio.sleep(0)
    [message] = warned.messages
    assert message.startswith("this machine is overloaded: the event loop waited for a processor")
    assert "for 0.0 of 0.05 s" in message


def test_the_system_says_how_long_a_thread_waited() -> None:
    waited = blocked_loop._waited(threading.get_native_id())
    assert (waited > 0.0) == sys.platform.startswith("linux")


async def test_a_loop_that_runs_is_no_warning_and_the_thread_ends(warned: Warned) -> None:
    before = set(threading.enumerate())
    with watched_loop(seconds=0.05):
        [thread] = set(threading.enumerate()) - before
        for _ in range(5):
            await asyncio.to_thread(lambda: None)
    await asyncio.to_thread(thread.join, PATIENCE)
    assert not thread.is_alive()
    assert warned.messages == []


async def test_a_run_names_call_and_task(warned: Warned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "toolroll.rollout.runs.runner.watched_loop", lambda: watched_loop(seconds=0.05)
    )

    async def act(method: str, task: Task) -> None:
        if method == "step" and task.id == "t-1":
            warned.block()

    factory = ScriptedFactory(lambda: AsyncScripted(act), count=3)
    episodes = await play(factory, concurrency=1)
    assert [episode.result.reward for episode in episodes] == [1.0, 1.0, 1.0]
    named = {message.partition(" has")[0] for message in warned.messages}
    assert named == {"AsyncScripted.step of t-1"}
