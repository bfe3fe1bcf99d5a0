"""The executor: every call comes back as it ended, in at most so many threads, and nothing is held or waited for that is over."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest
from support.patience import PATIENCE

from toolroll.rollout.errors import UsageError
from toolroll.rollout.executor import Executor


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("toolroll-")]


async def ended(before: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(threads()) > before:
        assert time.monotonic() < deadline, f"{len(threads())} threads are left"
        await asyncio.sleep(0.01)


async def test_each_call_has_its_own_result() -> None:
    before = len(threads())
    async with Executor(8) as executor:
        found = await asyncio.gather(*(executor.off_loop(lambda at, more: (at, more), at, -at) for at in range(500)))
        assert found == [(at, -at) for at in range(500)]
        assert len(threads()) - before <= 8
    await ended(before)


async def test_a_thread_that_is_idle_is_used_again() -> None:
    async with Executor(8) as executor:
        names = {await executor.off_loop(lambda: threading.current_thread().name) for _ in range(20)}
        assert len(names) == 1


async def test_no_more_at_once_than_there_are_threads_and_all_of_them() -> None:
    gate, lock, at_once, most = threading.Barrier(4, timeout=PATIENCE), threading.Lock(), 0, 0

    def call() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        gate.wait()  # passes only where four are there at once
        with lock:
            at_once -= 1

    async with Executor(4) as executor:
        for _ in range(3):  # with fresh threads and with idle ones
            await asyncio.gather(*(executor.off_loop(call) for _ in range(12)))
    assert most == 4


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
async def test_what_a_call_raises_is_the_callers(error: BaseException) -> None:
    def call() -> None:
        raise error

    async with Executor(1) as executor:
        outcome: BaseException | None = None
        try:
            await executor.off_loop(call)
        except BaseException as raised:
            outcome = raised
        assert outcome is error
        assert await executor.off_loop(lambda: "and the thread lives") == "and the thread lives"


async def test_a_stop_iteration_does_not_hang() -> None:
    async with Executor(1) as executor:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(executor.off_loop(next, iter(())), PATIENCE)


async def test_what_was_cancelled_before_it_began_is_not_run() -> None:
    begun, go, run = threading.Event(), threading.Event(), list[str]()

    def hold() -> None:
        begun.set()
        go.wait(20)

    async with Executor(1) as executor:
        first = asyncio.create_task(executor.off_loop(hold))
        await asyncio.to_thread(begun.wait, 20)
        second = asyncio.create_task(executor.off_loop(run.append, "cancelled"))
        third = asyncio.create_task(executor.off_loop(run.append, "kept"))
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()  # begun: nobody waits for it any more
        go.set()
        await third
    assert run == ["kept"]


async def test_closing_cancels_what_waits_and_ends_the_threads() -> None:
    before, begun, go = len(threads()), threading.Event(), threading.Event()

    def hold() -> str:
        begun.set()
        go.wait(20)
        return "done"

    executor = Executor(1)
    running = asyncio.create_task(executor.off_loop(hold))
    await asyncio.to_thread(begun.wait, 20)
    waiting = asyncio.create_task(executor.off_loop(hold))
    await asyncio.sleep(0)
    executor.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(RuntimeError, match="the executor is closed"):
        await executor.off_loop(hold)
    go.set()
    assert await running == "done"
    await ended(before)


async def test_nothing_that_is_over_is_held() -> None:
    """And nothing of it waits for the garbage collector, which comes seldom in a run."""

    class Thing:
        pass

    def fail(given: Thing) -> None:
        raise ValueError("no")

    async with Executor(1) as executor:
        gc.collect()
        gc.disable()
        try:
            result: Any = await executor.off_loop(Thing)
            given = Thing()
            with suppress(ValueError):
                await executor.off_loop(fail, given)
            await executor.off_loop(time.sleep, 0)
            seen = weakref.ref(result), weakref.ref(given)
            del result, given
            assert [one() for one in seen] == [None, None]
        finally:
            gc.enable()


async def test_where_no_thread_can_be_started_the_call_fails_and_the_next_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before, run = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with Executor(1) as executor:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await executor.off_loop(run.append, "refused")
        monkeypatch.setattr(threading.Thread, "start", before)
        await asyncio.wait_for(executor.off_loop(run.append, "run"), PATIENCE)
    assert run == ["run"]


async def test_the_threads_of_a_forgotten_executor_end() -> None:
    before = len(threads())
    executor = Executor(4)
    await asyncio.gather(*(executor.off_loop(time.sleep, 0.01) for _ in range(4)))
    assert len(threads()) > before
    del executor
    await ended(before)


def test_another_event_loop() -> None:
    """Also while a call of a loop that is closed is still running."""
    executor, go = Executor(2), threading.Event()

    async def leave() -> None:
        task = asyncio.create_task(executor.off_loop(go.wait, 20))
        await asyncio.sleep(0)
        task.cancel()

    async def play() -> int:
        return await executor.off_loop(lambda: 7)

    asyncio.run(leave())
    assert asyncio.run(play()) == 7
    go.set()
    assert asyncio.run(play()) == 7
    executor.close()


def test_an_executor_has_a_thread() -> None:
    with pytest.raises(ValueError, match="at least 1 thread, not 0"):
        Executor(0)


async def test_a_call_that_was_given_up_gives_its_place_to_another() -> None:
    before, go, running = len(threads()), threading.Event(), list[int]()

    def hang(number: int) -> None:
        running.append(number)
        go.wait(PATIENCE)

    async with Executor(1, most_given_up=2) as executor:
        for number in range(3):
            hanging = asyncio.create_task(executor.off_loop(hang, number, what="Pond.step"))
            while len(running) <= number:
                await asyncio.sleep(0)
            hanging.cancel()
            await asyncio.wait([hanging])
            if number < 2:
                assert await asyncio.wait_for(executor.off_loop(lambda: "done"), PATIENCE) == "done"
        with pytest.raises(UsageError, match=r"^3 calls that were given up still run.*: Pond\.step \(3\)\. Give what"):
            await executor.off_loop(lambda: None)
        go.set()
        await ended(before + 1)  # the threads of calls that were given up end with them
        assert await executor.off_loop(lambda: "again") == "again"
    await ended(before)


async def test_what_waits_for_a_place_has_not_begun() -> None:
    go, begun = threading.Event(), list[str]()
    async with Executor(1) as executor:
        first = asyncio.create_task(executor.off_loop(go.wait, PATIENCE, begun=lambda: begun.append("first")))
        second = asyncio.create_task(executor.off_loop(go.wait, PATIENCE, begun=lambda: begun.append("second")))
        for _ in range(10):
            await asyncio.sleep(0)
        assert begun == ["first"]
        go.set()
        await asyncio.gather(first, second)
    assert begun == ["first", "second"]


async def test_no_place_is_lost_whenever_the_one_that_waits_is_cancelled() -> None:
    for rounds in range(8):
        go = threading.Event()
        async with Executor(1) as executor:
            first = asyncio.create_task(executor.off_loop(go.wait, PATIENCE))
            second = asyncio.create_task(executor.off_loop(lambda: None))
            await asyncio.sleep(0)
            go.set()
            asyncio.create_task(cancel_after(rounds, second))  # noqa: RUF006 - it ends before the test
            await asyncio.wait([first, second])
            assert await asyncio.wait_for(executor.off_loop(lambda: "free"), PATIENCE) == "free"


async def cancel_after(rounds: int, task: asyncio.Task[Any]) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)
    task.cancel()
