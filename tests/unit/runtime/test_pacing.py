"""`Turnstile`: how many tasks pass in one iteration of the event loop."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from support.patience import PATIENCE

from toolroll.rollout.runtime.pacing import Turnstile


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


@pytest.mark.parametrize("left", [1, 2, 3])
def test_an_event_loop_that_was_closed_leaves_nothing(left: int) -> None:
    turnstile = Turnstile(2)

    async def leave() -> None:
        waiting = [asyncio.ensure_future(turnstile.passed()) for _ in range(left)]
        await asyncio.sleep(0)
        waiting[-1].cancel()

    asyncio.run(leave())
    passed = asyncio.run(passing(turnstile, 4))
    assert [number for number, _ in passed] == [0, 1, 2, 3]


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
