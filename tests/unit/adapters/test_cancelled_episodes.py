"""Episodes that are cancelled or interrupted: each adapter waits until their environments are
closed.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from support import framework_engines as engines
from support import miles_mirror, verl_mirror
from support.closing import NAME, Closing, Held, holding
from support.slime_mirror import DataSource
from support.slime_trainer import arguments
from support.trl_mirror import a_trainer

from toolroll.agents.text_agent import TextAgent
from toolroll.rollout.adapters import slime
from toolroll.rollout.adapters.areal import ToolrollWorkflow
from toolroll.rollout.adapters.driven import DrivenEpisode
from toolroll.rollout.adapters.episodes import EpisodeSettings, gather
from toolroll.rollout.adapters.miles import generate
from toolroll.rollout.adapters.skyrl import ToolrollGenerator
from toolroll.rollout.adapters.slime import generate_rollout
from toolroll.rollout.adapters.trl import make_rollout_func
from toolroll.rollout.adapters.verl import ToolrollAgentLoop, agent_loop
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.rollout.types import Task

COUNT = 4
SETTINGS: dict[str, Any] = {"env": NAME, "parser": "hermes"}


def interrupt() -> None:
    """Ctrl-C for the test's thread, which waits for a rollout."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def all_are_closed(count: int = COUNT) -> bool:
    return len(Closing.opened) == count and len(set(Closing.closed)) == count


def slime_args(engine: EmbeddedEngine) -> Any:
    ip, port = engine.url.removeprefix("http://").split(":")
    return arguments(sglang_router_ip=ip, sglang_router_port=int(port), toolroll_env=NAME)


# --- interrupts -----------------------------------------------------------------------------------


def test_an_interrupt_of_trl_s_rollout_ends_its_episodes() -> None:
    with holding(COUNT, interrupt) as engine:
        rollout = make_rollout_func({**SETTINGS, "concurrency": COUNT}, engine=engine.url)
        with pytest.raises(KeyboardInterrupt):
            rollout(["0"] * COUNT, a_trainer())
        assert all_are_closed()
        output = rollout(["0"] * COUNT, a_trainer())  # the places of the others are free
        assert output["toolroll_reward"] == [1.0] * COUNT
        rollout.close()
    assert all_are_closed(2 * COUNT)


def test_an_interrupt_of_slime_s_rollout_ends_its_episodes(sample_type: Any, closing: None) -> None:
    with holding(COUNT, interrupt) as engine:
        args = slime_args(engine)
        args.toolroll_concurrency = COUNT
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        with pytest.raises(KeyboardInterrupt):
            generate_rollout(args, 0, source)
        assert all_are_closed()
        output = generate_rollout(args, 0, source)
        assert [sample.reward for group in output.samples for sample in group] == [1.0] * COUNT


# --- errors and cancellations ---------------------------------------------------------------------


def test_a_wrong_task_ends_trl_s_other_episodes_first() -> None:
    with holding(COUNT - 1, Closing.gate.set) as engine:
        rollout = make_rollout_func(SETTINGS, engine=engine.url)
        with pytest.raises(UsageError, match="the task is wrong"):
            rollout([*["0"] * (COUNT - 1), str(Closing.WRONG)], a_trainer())
        assert all_are_closed()
        rollout.close()


Play = Callable[[str, Any, list[int]], Awaitable[object]]


async def with_slime(url: str, engine: Any, tasks: list[int]) -> object:
    args = slime_args(engine)
    params = {"max_new_tokens": 20}
    return await asyncio.gather(
        *(slime.generate(args, miles_mirror.Sample(index=at, prompt=at), params) for at in tasks)
    )


async def with_miles(url: str, engine: Any, tasks: list[int]) -> object:
    state = miles_mirror.GenerateState(slime_args(engine))
    samples = [miles_mirror.Sample(index=at, prompt=at) for at in tasks]
    params = {"max_new_tokens": 20}
    return await asyncio.gather(
        *(generate(miles_mirror.GenerateFnInput(state, one, params, False)) for one in samples)
    )


async def with_skyrl(url: str, engine: Any, tasks: list[int]) -> object:
    client = engines.SkyrlClient(url)
    config = engines.GeneratorConfig()
    own = ToolrollGenerator(config, load_embedded_tokenizer(), client, EpisodeSettings(**SETTINGS))
    prompts = [[{"role": "user", "content": str(at)}] for at in tasks]
    try:
        return await own.generate({"prompts": prompts})
    finally:
        await own.aclose()


async def with_areal(url: str, engine: Any, tasks: list[int]) -> object:
    config = engines.GenerationHyperparameters(max_new_tokens=20)
    own = ToolrollWorkflow(config, load_embedded_tokenizer(), EpisodeSettings(**SETTINGS))
    inference = engines.ArealInference(url)
    try:
        rows = [own.arun_episode(inference, {"index": at}) for at in tasks]
        return await asyncio.gather(*rows)
    finally:
        await own.aclose()


async def with_verl(url: str, engine: Any, tasks: list[int]) -> object:
    async with aiohttp.ClientSession() as http:
        servers = verl_mirror.Servers(url, http)
        given = verl_mirror.loop_arguments(servers, load_embedded_tokenizer())
        try:
            return await asyncio.gather(
                *(
                    ToolrollAgentLoop(**given, settings=dict(SETTINGS)).run(
                        {"logprobs": True}, extra_info={"index": at}, raw_prompt=[]
                    )
                    for at in tasks
                )
            )
        finally:
            for player in agent_loop._players.pop():
                await player.aclose()


ADAPTERS: dict[str, Play] = {
    "slime": with_slime,
    "miles": with_miles,
    "skyrl": with_skyrl,
    "areal": with_areal,
    "verl": with_verl,
}


@pytest.mark.parametrize("name", ADAPTERS)
async def test_a_cancelled_call_returns_after_its_episodes_are_closed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles_mirror.install(monkeypatch)
    verl_mirror.install(monkeypatch)
    engines.install_areal(monkeypatch)
    Closing.clear()
    full = asyncio.Event()
    tokenizer = load_embedded_tokenizer()
    async with EmbeddedEngine(tokenizer, Held(COUNT, full.set)) as engine:
        playing = asyncio.ensure_future(ADAPTERS[name](engine.url, engine, [0] * COUNT))
        await full.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await slime.aclose()
        assert all_are_closed()


async def test_skyrl_s_wrong_task_ends_the_other_episodes_first() -> None:
    Closing.clear()
    tokenizer = load_embedded_tokenizer()
    async with EmbeddedEngine(tokenizer, Held(COUNT - 1, Closing.gate.set)) as engine:
        with pytest.raises(UsageError, match="the task is wrong"):
            await with_skyrl(engine.url, engine, [*[0] * (COUNT - 1), Closing.WRONG])
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


async def test_a_cancellation_after_a_wrong_task_waits_for_a_close_that_has_begun() -> None:
    begun, gate, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wrong() -> None:
        await asyncio.sleep(0)
        raise UsageError("the task is wrong")

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
    with pytest.raises(UsageError, match="the task is wrong"):
        await playing
    assert closed.is_set()


async def test_the_error_of_an_episode_keeps_its_cause() -> None:
    async def wrong() -> None:
        try:
            int("x")
        except ValueError as error:
            raise UsageError("the task is wrong") from error

    with pytest.raises(UsageError) as caught:
        await gather([wrong()])
    assert isinstance(caught.value.__cause__, ValueError)


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
