"""`paced_garbage`: the collector runs by the clock, and is what it was afterwards."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from toolroll.rollout import garbage
from toolroll.rollout.garbage import paced_garbage


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable()


async def freed(knot: weakref.ref[Knot]) -> bool:
    for _ in range(2000):
        if knot() is None:
            return True
        await asyncio.sleep(0.005)
    return False


async def test_a_knot_is_freed_by_the_clock() -> None:
    async with paced_garbage(0.01):
        assert not gc.isenabled()
        assert await freed(weakref.ref(Knot()))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


async def test_what_became_garbage_late_is_freed_by_a_round_that_visits_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_WHOLE", 3)
    old = Knot()
    async with paced_garbage(0.01):
        watched = weakref.ref(old)
        del old
        assert await freed(watched)


async def test_a_process_that_grows_need_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_LOOK", 0.01)
    held = iter([0] * 3)
    monkeypatch.setattr(garbage, "resident", lambda: next(held, 2**30))
    async with paced_garbage(1000.0):
        assert await freed(weakref.ref(Knot()))


@pytest.mark.parametrize(("found", "rounds"), [(0, [1, 3, 7, 15, 23]), (garbage._FEW, [1, 2, 3, 4, 5])])
async def test_rounds_that_find_next_to_nothing_come_more_rarely(
    monkeypatch: pytest.MonkeyPatch, found: int, rounds: list[int]
) -> None:
    ticks, seen = 0, []
    enough = asyncio.Event()

    def freeze() -> None:
        nonlocal ticks
        ticks += 1

    def collect() -> int:
        seen.append(ticks)
        if len(seen) > len(rounds):
            enough.set()
        return found

    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(gc, "collect", collect)
    async with paced_garbage(0.001):
        await asyncio.wait_for(enough.wait(), 60)
    assert seen[1 : len(rounds) + 1] == rounds, "the first one is that of the beginning"


def test_memory_is_told() -> None:
    before = garbage.resident()
    block = b"x" * 2**26
    assert garbage.resident() - before > len(block) / 2


async def test_objects_that_were_frozen_stay_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    async with paced_garbage(0.01):
        assert gc.isenabled()
    assert gc.get_freeze_count() == count


async def test_the_collector_is_put_back_after_an_error() -> None:
    with pytest.raises(KeyError):
        async with paced_garbage():
            raise KeyError
    assert gc.isenabled()


async def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    async with paced_garbage(0.01):
        assert not gc.isenabled()
    assert not gc.isenabled()
