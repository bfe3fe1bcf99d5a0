"""`paced_garbage`: the collector comes seldom in a run, and is put back afterwards."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from support.commands import run_command, toolroll
from support.scripted_runs import Scripted, ScriptedFactory, play

from toolroll import Model, RolloutArgs
from toolroll.rollout.runtime.garbage import THRESHOLD, paced_garbage
from toolroll.testing import EmbeddedEngine, PolicyRequest, serve_in_thread

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


def test_it_is_put_back_unless_its_user_has_set_it() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), paced_garbage():
        assert is_paced()
        with paced_garbage():
            assert is_paced()
        assert is_paced(), "the outer context ends it"
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
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
async def test_a_runner_and_a_model_from_arguments_pace_it(pace_gc: bool) -> None:
    seen = list[bool]()
    act = lambda name, task: seen.append(is_paced())
    await play(ScriptedFactory(lambda: Scripted(act), count=2), pace_gc=pace_gc)
    assert set(seen) == {pace_gc}
    assert not is_paced()
    args = RolloutArgs(model="embedded", parser="hermes", pace_gc=pace_gc)
    async with Model.from_args(args):
        assert is_paced() is pace_gc
    assert not is_paced()


@pytest.mark.parametrize("options", [[], ["--pace-gc"], ["--no-pace-gc"]])
def test_no_pace_gc_leaves_it_as_it_is_in_a_run(tokenizer: Any, options: list[str]) -> None:
    before, seen = gc.get_threshold(), list[bool]()

    def policy(request: PolicyRequest) -> str:
        seen.append(is_paced())
        return "Goodbye."

    with serve_in_thread(EmbeddedEngine(tokenizer, policy)) as engine:
        command = run_command(engine.url, "--tasks", "0-2", "--no-do-nothing", *options)
        assert toolroll(*command).exit_code == 0
    assert len(seen) >= 3
    assert set(seen) == {options != ["--no-pace-gc"]}
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
