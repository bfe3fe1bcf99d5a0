"""The commands' event loop: uvloop's if it is installed, else asyncio's own. What is left on it
does not end a run, a call that blocks it is named, and few tasks pass in one iteration.
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
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop
from support.patience import PATIENCE
from support.scripted_runs import AsyncScripted, ScriptedFactory, Talker, play
from typer.testing import CliRunner

from toolroll import Episode, Runner, RunSettings, Task
from toolroll.cli.app import app
from toolroll.rollout.errors import RolloutError
from toolroll.rollout.runtime import blocked_loop, event_loop
from toolroll.rollout.runtime.blocked_loop import watched_loop
from toolroll.rollout.runtime.event_loop import run
from toolroll.rollout.runtime.foreign import retrieve
from toolroll.rollout.runtime.pacing import Turnstile
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
    with pytest.raises(RolloutError):
        await runner.run(factory.tasks("test"), store)


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


# --- `Turnstile`: how many tasks pass in one iteration of the event loop -------------------------


class Iterations:
    """Counts the iterations of the running event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._tick()

    def _tick(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self._tick)


async def passing(turnstile: Turnstile, tasks: int, cancelled: Sequence[int] = ()) -> list[Any]:
    """Return the number of each task that passed and its iteration, in order."""
    iterations, passed = Iterations(), list[tuple[int, int]]()

    async def task(number: int) -> None:
        await turnstile.passed()
        passed.append((number, iterations.count))

    running = [asyncio.create_task(task(number)) for number in range(tasks)]
    await asyncio.sleep(0)
    for number in cancelled:
        running[number].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return passed


@pytest.mark.parametrize(
    ("places", "tasks", "cancelled", "waits"),
    [
        (3, 10, (), {0: 3, 2: 3, 4: 3, 6: 1}),
        (3, 3, (), {0: 3}),  # without a crowd nothing waits
        (2, 8, (2, 3, 5), {0: 2, 2: 2, 4: 1}),  # a cancelled task takes no place
    ],
)
async def test_few_pass_at_once(places: int, tasks: int, cancelled: Any, waits: Any) -> None:
    passed = await passing(Turnstile(places), tasks, cancelled)
    assert [number for number, _ in passed] == sorted({*range(tasks)} - {*cancelled})
    assert Counter(iteration - passed[0][1] for _, iteration in passed) == waits


async def test_a_later_crowd_finds_at_most_the_same_places() -> None:
    turnstile = Turnstile(2)
    for _ in range(3):
        passed = await passing(turnstile, 5)
        assert max(Counter(iteration for _, iteration in passed).values()) == 2


async def test_coming_one_by_one_costs_few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    turnstile, calls, loop = Turnstile(4), list[Any](), asyncio.get_running_loop()
    call_soon = loop.call_soon

    def counted(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
        calls.append(callback)
        return call_soon(callback, *args, **kwargs)

    for _ in range(12):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_soon", counted)
            await turnstile.passed()
        await asyncio.sleep(0)
    assert len(calls) == 3


def test_another_event_loop_in_between_keeps_nobody_waiting() -> None:
    turnstile = Turnstile(2)
    with asyncio.Runner() as first, asyncio.Runner() as other:
        waiting = [first.get_loop().create_task(turnstile.passed()) for _ in range(20)]
        first.run(asyncio.sleep(0))
        assert not all(task.done() for task in waiting)
        other.run(turnstile.passed())

        async def all_pass() -> None:
            await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE)

        first.run(all_pass())
