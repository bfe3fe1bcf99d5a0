"""The turnstile: a few in each pass of the event loop, in the order of coming, and nobody is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from support.patience import PATIENCE

from toolroll.rollout.engine.turnstile import AT_ONCE, Turnstile


async def counted(passes: list[int]) -> None:
    while True:
        passes[0] += 1
        await asyncio.sleep(0)


async def test_a_few_are_through_in_each_pass_of_the_loop() -> None:
    turnstile, passes, through = Turnstile(), [0], list[tuple[int, int]]()
    counting = asyncio.create_task(counted(passes))

    async def come(number: int) -> None:
        await turnstile.enter()
        through.append((number, passes[0]))

    await asyncio.gather(*(come(number) for number in range(10 * AT_ONCE)))
    counting.cancel()
    assert [number for number, _ in through] == list(range(10 * AT_ONCE))
    assert max(Counter(at for _, at in through).values()) == AT_ONCE


async def test_who_is_alone_does_not_wait() -> None:
    turnstile = Turnstile()
    for _ in range(3 * AT_ONCE):
        entering = turnstile.enter()
        with suppress(StopIteration):
            entering.send(None)
            raise AssertionError("it waited")
        await asyncio.sleep(0)


async def test_who_gives_up_is_passed_over() -> None:
    turnstile = Turnstile()
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(4 * AT_ONCE)]
    await asyncio.sleep(0)
    for task in tasks[AT_ONCE::2]:
        task.cancel()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
    assert [isinstance(one, asyncio.CancelledError) for one in done] == [False] * AT_ONCE + [True, False] * (3 * AT_ONCE // 2)
    await asyncio.wait_for(turnstile.enter(), PATIENCE)


def test_another_event_loop_finds_it_open() -> None:
    turnstile = Turnstile()

    async def crowd() -> None:
        for _ in range(AT_ONCE):
            await turnstile.enter()
        asyncio.get_running_loop().stop()  # before the next pass, in which it would have opened

    loop = asyncio.new_event_loop()
    crowded = loop.create_task(crowd())
    loop.run_forever()
    loop.close()
    assert crowded.done()
    asyncio.run(asyncio.wait_for(turnstile.enter(), PATIENCE))
