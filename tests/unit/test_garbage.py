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


def test_memory_is_told() -> None:
    before = garbage.resident()
    block = b"x" * 2**26
    assert garbage.resident() - before > len(block) / 2


async def test_objects_that_were_frozen_stay_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    async with paced_garbage(0.01):
        assert gc.isenabled()
    assert gc.get_freeze_count() > count // 2  # some objects die meanwhile; thawing would leave none


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
