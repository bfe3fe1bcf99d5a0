"""`paced_garbage`: the collector comes seldom in a run, and is put back afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted_runs import Scripted, ScriptedFactory, play

from toolroll.rollout.model.model import Model
from toolroll.rollout.runtime.garbage import THRESHOLD, paced_garbage
from toolroll.rollout.settings import RolloutArgs

pytestmark = pytest.mark.usefixtures("unfrozen")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    assert gc.isenabled()
    assert before != THRESHOLD
    yield
    gc.unfreeze()
    gc.enable()
    gc.set_threshold(*before)


def is_paced() -> bool:
    return gc.get_threshold() == THRESHOLD and gc.get_freeze_count() > 0


def test_it_is_put_back_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), paced_garbage():
        assert is_paced()
        with paced_garbage():
            assert is_paced()
        assert is_paced(), "the outer context ends it"
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_its_user_has_set_stays() -> None:
    gc.disable()
    with paced_garbage():
        assert not is_paced()
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    with paced_garbage():
        assert not is_paced()
    assert gc.get_freeze_count()


def test_garbage_is_still_collected() -> None:
    class Knot:
        alive = 0

        def __init__(self) -> None:
            self.self = self
            Knot.alive += 1

        def __del__(self) -> None:
            Knot.alive -= 1

    with paced_garbage():
        for _ in range(2 * THRESHOLD[0]):
            Knot()
        assert Knot.alive < 1.5 * THRESHOLD[0]


@pytest.mark.parametrize("pace_gc", [True, False])
async def test_a_runner_paces_it(pace_gc: bool) -> None:
    seen = list[bool]()
    await play(
        ScriptedFactory(lambda: Scripted(lambda name, task: look(seen)), count=2), pace_gc=pace_gc
    )
    assert set(seen) == {pace_gc}
    assert not is_paced()


def look(seen: list[bool]) -> Any:
    seen.append(is_paced())


@pytest.mark.parametrize("pace_gc", [True, False])
async def test_a_model_from_arguments_paces_it_until_it_is_closed(pace_gc: bool) -> None:
    args = RolloutArgs(model="embedded", parser="hermes", pace_gc=pace_gc)
    async with Model.from_args(args):
        assert is_paced() is pace_gc
    assert not is_paced()


async def test_the_first_model_to_close_leaves_the_other_ones_pace() -> None:
    args = RolloutArgs(model="embedded", parser="hermes")
    first, second = Model.from_args(args), Model.from_args(args)
    await first.aclose()
    assert is_paced()
    await second.aclose()
    assert not is_paced()
