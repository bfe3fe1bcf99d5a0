"""Episodes that are cancelled or interrupted: each adapter waits until their environments are
closed.
"""

import asyncio
import signal
import threading
from typing import Any

import pytest
from support.closing import NAME, Closing, Held, holding
from support.slime_mirror import DataSource
from support.slime_trainer import arguments, router_of
from support.trl_mirror import a_trainer
from unit.adapters.test_same_episodes import ADAPTERS, World

from toolroll.agents.text_agent import TextAgent
from toolroll.rollout.environment import Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.threads import Threads
from toolroll.testing import EmbeddedEngine, embedded_tokenizer_path, load_embedded_tokenizer
from toolroll.trainers import slime
from toolroll.trainers.driven import DrivenEpisode
from toolroll.trainers.episodes import EpisodeSettings, gather
from toolroll.trainers.slime import generate_rollout
from toolroll.trainers.trl import make_rollout_func

COUNT = 4
SETTINGS: dict[str, Any] = {"env": NAME, "parser": "hermes"}


def interrupt() -> None:
    """Ctrl-C for the test's thread, which waits for a rollout."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def all_are_closed(count: int = COUNT) -> bool:
    return len(Closing.opened) == count and len(set(Closing.closed)) == count


def test_an_interrupt_of_trl_s_rollout_ends_its_episodes() -> None:
    with holding(COUNT, interrupt) as engine:
        rollout = make_rollout_func({**SETTINGS, "concurrency": COUNT}, engine=engine.url)
        with pytest.raises(KeyboardInterrupt):
            rollout(["0"] * COUNT, a_trainer())
        assert all_are_closed()
        output = rollout(["0"] * COUNT, a_trainer())  # the places of the others are free
        assert output["toolroll_reward"] == [1.0] * COUNT
        rollout.close()


def test_an_interrupt_of_slime_s_rollout_ends_its_episodes(sample_type: Any, closing: None) -> None:
    with holding(COUNT, interrupt) as engine:
        args = arguments(**router_of(engine), toolroll_env=NAME, toolroll_concurrency=COUNT)
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        with pytest.raises(KeyboardInterrupt):
            generate_rollout(args, 0, source)
        assert all_are_closed()
        output = generate_rollout(args, 0, source)
        assert [sample.reward for group in output.samples for sample in group] == [1.0] * COUNT


def test_a_wrong_task_ends_trl_s_other_episodes_first() -> None:
    with holding(COUNT - 1, Closing.gate.set) as engine:
        rollout = make_rollout_func(SETTINGS, engine=engine.url)
        with pytest.raises(UsageError, match="the task is wrong"):
            rollout([*["0"] * (COUNT - 1), str(Closing.WRONG)], a_trainer())
        assert all_are_closed()
        rollout.close()


@pytest.mark.parametrize("name", ["slime", "miles", "skyrl", "areal", "verl"])
async def test_a_cancelled_call_ends_after_its_episodes(name: str, mirrors: None) -> None:
    Closing.clear()
    full = asyncio.Event()
    tokenizer, folder = load_embedded_tokenizer(), embedded_tokenizer_path()
    world = World(tokenizer, folder, indices=[0] * COUNT, env=NAME)
    async with EmbeddedEngine(tokenizer, Held(COUNT, full.set)) as world.engine:
        playing = asyncio.ensure_future(ADAPTERS[name](world))
        held = asyncio.ensure_future(full.wait())
        await asyncio.wait([playing, held], return_when=asyncio.FIRST_COMPLETED)
        assert held.done(), playing.result()  # it raises what ended the call, such as a skip
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await slime.aclose()
        assert all_are_closed()


async def test_a_cancellation_waits_for_a_close_that_has_begun() -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    class Slow(Closing):
        async def close(self) -> None:
            begun.set()
            await gate.wait()
            self.closed.append(self)

    class Leaving(TextAgent):
        async def reply(self, *given: Any, **named: Any) -> Any:
            raise OSError("no model")

    Closing.clear()
    playing = asyncio.create_task(Leaving(Threads(1)).asolve(Slow(), task=Task("t", 0)))
    await begun.wait()
    playing.cancel()
    await asyncio.wait([playing], timeout=0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not playing.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert all_are_closed(1)


async def test_a_cancellation_after_an_error_waits_and_keeps_its_cause() -> None:
    begun, gate, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wrong() -> None:
        await asyncio.sleep(0)
        raise UsageError("the task is wrong") from ValueError()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            begun.set()
            await gate.wait()
            closed.set()

    playing = asyncio.create_task(gather([wrong(), slow()]))
    await begun.wait()
    playing.cancel()
    await asyncio.wait([playing], timeout=0)
    assert not playing.done()
    gate.set()
    with pytest.raises(UsageError, match="the task is wrong") as caught:
        await playing
    assert closed.is_set() and isinstance(caught.value.__cause__, ValueError)


async def test_a_cancelled_step_ends_a_driven_episode() -> None:
    Closing.clear()
    begun = threading.Event()

    class Stuck(Closing):
        async def step(self, action: Any) -> Any:  # type: ignore[override]
            begun.set()
            await asyncio.Event().wait()

    tokenizer = load_embedded_tokenizer()
    episode = DrivenEpisode(Stuck(), Task("t", 0), tokenizer, EpisodeSettings(parser="hermes"))
    assert await episode.start() is not None
    stepping = asyncio.create_task(episode.step([tokenizer.eos_token_id], [-1.0]))
    while not begun.is_set():
        await asyncio.sleep(0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert all_are_closed(1)
