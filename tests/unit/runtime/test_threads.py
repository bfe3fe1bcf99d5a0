"""Blocking calls in threads: their results, how many run at once, and that nothing is held."""

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
from toolroll.rollout.runtime.threads import Threads


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "toolroll"]


async def ended(before: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(threads()) > before:
        assert time.monotonic() < deadline, f"{len(threads())} threads are left"
        await asyncio.sleep(0.01)


async def test_each_call_has_its_own_result_or_error() -> None:
    before = len(threads())
    calls = Threads(8)
    found = await asyncio.gather(
        *(calls.run_in_thread(lambda at, more: (at, more), at, -at) for at in range(500))
    )
    assert found == [(at, -at) for at in range(500)]
    await ended(before)
    calls = Threads(1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(calls.run_in_thread(next, iter(())), PATIENCE)


async def test_no_more_at_once_than_is_allowed_and_all_of_them() -> None:
    gate, lock, at_once, most = threading.Barrier(4, timeout=PATIENCE), threading.Lock(), 0, 0

    def call() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        gate.wait()  # passes only where four are there at once
        with lock:
            at_once -= 1

    calls = Threads(4)
    for _ in range(3):
        await asyncio.gather(*(calls.run_in_thread(call) for _ in range(12)))
    assert most == 4
    with pytest.raises(ValueError, match="at least 1 call must be allowed at once, not 0"):
        Threads(0)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
async def test_what_a_call_raises_is_the_callers(error: BaseException) -> None:
    def call() -> None:
        raise error

    calls = Threads(1)
    with pytest.raises(type(error)) as raised:
        await calls.run_in_thread(call)
    assert raised.value is error
    assert await calls.run_in_thread(lambda: "and the thread lives") == "and the thread lives"


async def test_what_was_cancelled_before_it_began_is_not_run() -> None:
    begun, go, run = threading.Event(), threading.Event(), list[str]()

    def hold() -> None:
        begun.set()
        go.wait(20)

    calls = Threads(1)
    first = asyncio.create_task(calls.run_in_thread(hold))
    await asyncio.to_thread(begun.wait, 20)
    second = asyncio.create_task(calls.run_in_thread(run.append, "cancelled"))
    third = asyncio.create_task(calls.run_in_thread(run.append, "kept"))
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()  # begun: nobody waits for it any more
    go.set()
    await third
    assert run == ["kept"]


async def test_nothing_that_is_over_is_held() -> None:
    """And nothing of it waits for the garbage collector, which comes seldom in a run."""

    class Thing:
        pass

    def fail(given: Thing) -> None:
        raise ValueError("no")

    calls, before = Threads(1), len(threads())
    gc.collect()
    gc.disable()
    try:
        result: Any = await calls.run_in_thread(Thing)
        given = Thing()
        with suppress(ValueError):
            await calls.run_in_thread(fail, given)
        await calls.run_in_thread(time.sleep, 0)
        await ended(before)  # a thread may be about to let go
        seen = weakref.ref(result), weakref.ref(given)
        del result, given
        assert [one() for one in seen] == [None, None]
    finally:
        gc.enable()


async def test_a_call_without_a_thread_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, run = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = Threads(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await calls.run_in_thread(run.append, "refused")
    monkeypatch.setattr(threading.Thread, "start", before)
    await asyncio.wait_for(calls.run_in_thread(run.append, "run"), PATIENCE)
    assert run == ["run"]


def test_another_event_loop() -> None:
    """Also while a call of a loop that is closed is still running."""
    calls, go = Threads(2), threading.Event()

    async def leave() -> None:
        task = asyncio.create_task(calls.run_in_thread(go.wait, 20))
        await asyncio.sleep(0)
        task.cancel()

    async def play() -> int:
        return await calls.run_in_thread(lambda: 7)

    asyncio.run(leave())
    assert asyncio.run(play()) == 7
    go.set()
    assert asyncio.run(play()) == 7


async def test_a_call_that_was_given_up_gives_its_place_to_another() -> None:
    before, go, running = len(threads()), threading.Event(), list[int]()

    def hang(number: int) -> None:
        running.append(number)
        go.wait(PATIENCE)

    calls = Threads(1, most_given_up=2, grace=0.0)
    for number in range(3):
        hanging = asyncio.create_task(calls.run_in_thread(hang, number, what="Pond.step"))
        while len(running) <= number:
            await asyncio.sleep(0)
        hanging.cancel()
        await asyncio.wait([hanging])
        if number < 2:
            assert await asyncio.wait_for(calls.run_in_thread(lambda: "done"), PATIENCE) == "done"
    with pytest.raises(
        UsageError, match=r"^3 calls exceeded their time limit.*: Pond\.step \(3\)\. Add a timeout"
    ):
        await calls.run_in_thread(lambda: None)
    go.set()
    await ended(before)  # the threads of calls that were given up end with them
    assert await calls.run_in_thread(lambda: "again") == "again"
    await ended(before)


async def test_calls_that_are_only_slow_are_waited_for() -> None:
    """Those that a trainer gives up when it has enough samples end a moment later."""
    before, go = len(threads()), [threading.Event() for _ in range(3)]
    calls = Threads(3, most_given_up=0, grace=PATIENCE)
    slow = [asyncio.create_task(calls.run_in_thread(one.wait, PATIENCE)) for one in go]
    await asyncio.sleep(0)
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)
    waiting = [asyncio.create_task(calls.run_in_thread(lambda: "done")) for _ in range(4)]
    done, _ = await asyncio.wait(waiting, timeout=0.01)
    assert not done
    go[0].set()
    assert await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE) == ["done"] * 4
    for one in go:
        one.set()
    await ended(before)
