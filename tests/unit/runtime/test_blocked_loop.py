"""A call that blocks the event loop is named in a warning, while it still runs."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

import pytest
from support.patience import PATIENCE
from support.scripted_runs import AsyncScripted, ScriptedFactory, play

from toolroll.rollout.environment import Task
from toolroll.rollout.runtime import blocked_loop
from toolroll.rollout.runtime.blocked_loop import watched_loop


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
    async def call() -> None:
        warned.block()
        assert not warned.event.wait(0.2)  # there is no second message

    with watched_loop(seconds=0.05):
        for number in range(2):
            await asyncio.create_task(call(), name=f"Pond.step of t-{number}")
    for number, message in enumerate(warned.messages):
        assert message.startswith(
            f"Pond.step of t-{number} has blocked the event loop for 0.05 s (threading.py, line "
        )
        assert "it must await, or run blocking code in a thread" in message
    assert len(warned.messages) == 2


async def test_a_callback_that_blocks_has_no_name(warned: Warned) -> None:
    done = asyncio.Event()

    def call() -> None:
        warned.block()
        done.set()

    with watched_loop(seconds=0.05):
        asyncio.get_running_loop().call_soon(call)
        await done.wait()
    assert warned.messages[0].startswith("a callback has blocked")


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
