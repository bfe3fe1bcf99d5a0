"""The runner: who is played, how often, under which seed, and what a failure does to the others."""

import asyncio
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.client import client, request
from support.episodes import agent, serving
from support.http import router_over
from support.loop_clock import skip, skip_until
from support.results import content
from support.source import ROOT
from support.standins import stand_in, stands_for
from support.toy_environment import PondFactory, look

from toolroll import Callback, Engine, EngineConfig, Model, Runner, RunSettings, Summary, get_parser
from toolroll.rollout.engine import ROUTING_KEY
from toolroll.rollout.environment import Action, Task
from toolroll.rollout.episode import Episode, InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.runs.runner import RunStoppedError, episode_seed, expected_calls, task_hash
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Status, StopReason
from toolroll.testing import EmbeddedEngine, Reply

PARAMS = {"temperature": 1.0, "max_new_tokens": 256}


def runner(
    factory: PondFactory, served: Model, callbacks: Sequence[Callback] = (), **settings: Any
) -> Runner:
    options = RunSettings(sampling_params=PARAMS, **settings)
    return Runner(factory, lambda: agent(served), options, callbacks=callbacks)


async def play(factory: PondFactory, served: Model, **settings: Any) -> list[Episode]:
    episodes: list[Episode] = []
    await runner(factory, served, **settings).run(factory.tasks("test"), episodes.append)
    return sorted(episodes, key=lambda found: (found.task_index, found.sample))


def alike(episodes: list[Episode]) -> list[dict[str, Any]]:
    """What is the same in every run."""
    return [content(played, circumstances=False) for played in episodes]


async def test_every_pair_once_and_the_seed_does_not_hang_on_the_order(tokenizer: Any) -> None:
    factory = PondFactory(5)
    async with serving(tokenizer, look) as (_, served):
        wide = await play(factory, served, samples=3, concurrency=15)
        narrow = await play(factory, served, samples=3, concurrency=1)
    pairs = [(f"t-{task}", sample) for task in range(5) for sample in range(3)]
    assert [(found.task_id, found.sample) for found in wide] == pairs
    assert alike(wide) == alike(narrow)
    assert len({found.seed for found in wide}) == 15
    assert {found.result.reward for found in wide} == {0.0, 1.0}


def test_seeds() -> None:
    episodes = [(0, "t-1", 2), (1, "t-1", 2), (0, "t-2", 2), (0, "t-1", 3), (0, "t-1/2", 0)]
    seeds = [episode_seed(*episode) for episode in episodes * 2]
    assert seeds[:5] == seeds[5:] and len(set(seeds)) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_hash_of_a_task_changes_with_its_data_only() -> None:
    data = {"prompt": "Hi", "books": [{"title": "A", "year": 1}]}
    turned = {"books": [{"year": 1, "title": "A"}], "prompt": "Hi"}
    known = "82ce4a216266ec584f0eb9e78d08b4a7"
    assert task_hash("desk", Task("t", 0, "test", data)) == known, "the same in every process"
    assert task_hash("desk", Task("t", 7, "train", turned)) == known
    others = [("tau", "t", data), ("desk", "u", data), ("desk", "t", {**data, "prompt": "Hello"})]
    assert known not in {task_hash(env, Task(name, 0, "", d)) for env, name, d in others}
    for addressed in ([object(), object()], [lambda: 1, lambda: 1]):
        assert len({task_hash("e", Task("t", 0, "", {"board": each})) for each in addressed}) == 1


async def test_the_calls_of_a_reference_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    desk, threads, free = find_environment("desk"), Threads(1), threading.Event()
    task = desk.tasks("test")[0]
    calls = await expected_calls(desk, task, threads)
    assert [call["name"] for call in calls[:1]] == ["find_member"]
    assert calls[0]["arguments"] == {"card": task.data["card"]}

    async def reference(task: Task) -> Any:
        return desk.reference(task)

    later: Any = SimpleNamespace(reference=reference)
    assert await expected_calls(later, task, threads) == calls
    broken: Any = SimpleNamespace(reference=lambda task: 1 / 0)
    assert await expected_calls(broken, Task("t", 0), threads) == []
    assert "the reference of task t is not recorded: ZeroDivisionError" in caplog.text
    stuck: Any = SimpleNamespace(reference=lambda task: free.wait(60))
    assert await skip_until(expected_calls(stuck, Task("u", 0), threads), seconds=61) == []
    free.set()
    assert "the reference of task u is not recorded: TimeoutError" in caplog.text


async def test_no_more_than_the_limit_at_once() -> None:
    running, most, three = 0, 0, asyncio.Barrier(3)

    class Watched:
        async def asolve(self, env: Any, *args: Any, **named: Any) -> InteractionResult:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await three.wait()
            running -= 1
            return InteractionResult("", 1.0, [], {})

    factory, episodes = PondFactory(21), list[Episode]()
    settings = RunSettings(concurrency=3)
    await Runner(factory, Watched, settings).run(factory.tasks("test"), episodes.append)
    assert (len(episodes), most) == (21, 3)


def closed(when: Callable[[Task], bool]) -> Callable[[Task, Action], None]:
    """What happens in a step of a pond: an error if it is `when`."""

    def on_step(task: Task, action: Action) -> None:
        if when(task):
            raise OSError("the pond is closed")

    return on_step


async def test_an_episode_may_be_rerun(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been, or it ends as data: t-3 fails in its first attempt and in the second
    step of its second one, and t-1 always.
    """
    monkeypatch.setattr("toolroll.rollout.runs.runner._FIRST_PAUSE", 0.0)
    fails = iter([True, False, True])
    closes = lambda task: task.id == "t-1" or (task.id == "t-3" and next(fails, False))
    factory = PondFactory(4, closed(closes))
    async with serving(tokenizer, look) as (_, served):
        undisturbed = await play(PondFactory(4), served)
        episodes = await play(factory, served, reruns=2)
    assert [episode.result.metrics["reruns"] for episode in episodes] == [0, 2, 0, 2]
    assert len(factory.made) == 8
    failed = episodes.pop(1).result
    del undisturbed[1]
    assert alike(episodes) == alike(undisturbed)
    outcome = (failed.status, failed.stop_reason, failed.reward)
    assert outcome == (Status.ABORTED, StopReason.ENVIRONMENT_ERROR, None)
    assert "the pond is closed" in failed.info["error"]["message"]


async def test_what_would_fail_again_is_not_played_again() -> None:
    class Broken:
        async def asolve(self, env: Any, *args: Any, **named: Any) -> InteractionResult:
            raise ZeroDivisionError("a defect of the agent")

    factory = PondFactory(2)
    episodes: list[Episode] = []
    await Runner(factory, Broken, RunSettings(reruns=5)).run(factory.tasks("test"), episodes.append)
    assert [found.result.stop_reason for found in episodes] == [StopReason.INTERNAL_ERROR] * 2
    error = episodes[0].result.info["error"]
    assert (error["type"], error["message"]) == ("ZeroDivisionError", "a defect of the agent")
    assert "in asolve" in error["traceback"]
    assert len(factory.made) == 2


async def test_an_episode_has_its_time(tokenizer: Any) -> None:
    hold = asyncio.Event()

    def slow(request: Any) -> Any:
        text = look(request)
        return Reply(text, hold=hold, hold_after=2) if "pond t-1," in request.text else text

    factory = PondFactory(3)
    found: list[Episode] = []
    async with serving(tokenizer, slow) as (engine, served):
        playing = asyncio.create_task(
            runner(factory, served, episode_timeout=600).run(factory.tasks("test"), found.append)
        )
        await engine.until(lambda engine: engine.held == 1)
        while len(found) < 2:
            await asyncio.sleep(0)
        skip(601)
        await playing
        await served.engine.aclose()  # the aborts are through
        assert engine.held == 0
    episodes = sorted(found, key=lambda episode: episode.task_index)
    late = episodes[1].result
    outcome = (late.status, late.stop_reason, late.reward)
    assert outcome == (Status.ABORTED, StopReason.TIME_LIMIT, None)
    assert "took more than 600 s" in late.info["error"]["message"]
    assert [episodes[at].result.status for at in (0, 2)] == [Status.COMPLETED] * 2
    assert [entry.aborted for entry in engine.log if entry.routing_key == "pond/t-1#0"] == [True]


async def test_cancelled_it_gives_nothing_unfinished_out(tokenizer: Any) -> None:
    hold = asyncio.Event()

    def stands(request: Any) -> Any:
        index = int(request.text.split("pond t-")[1].split(",")[0])
        return look(request) if index < 3 else Reply(look(request), hold=hold, hold_after=1)

    factory = PondFactory(8)
    episodes: list[Episode] = []
    async with serving(tokenizer, stands) as (engine, served):
        running = asyncio.create_task(
            runner(factory, served, concurrency=8).run(factory.tasks("test"), episodes.append)
        )
        while len(episodes) < 3 or engine.held < 5:
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await served.engine.aclose()
        assert sorted(found.task_id for found in episodes) == ["t-0", "t-1", "t-2"]
        aborted = [entry.routing_key for entry in engine.log if entry.aborted]
        assert sorted(aborted) == [f"pond/t-{index}#0" for index in range(3, 8)]


async def test_it_gives_up_where_everything_fails(tokenizer: Any) -> None:
    factory = PondFactory(100, closed(lambda task: task.index >= 4))
    episodes: list[Episode] = []
    async with serving(tokenizer, look) as (_, served):
        run = runner(factory, served, concurrency=1, give_up_after=6).run
        words = "6 attempts at episodes failed in a row.*the pond is closed"
        with pytest.raises(RunStoppedError, match=words):
            await run(factory.tasks("test"), episodes.append)
    assert sum(found.result.reward is not None for found in episodes) == 4
    assert len(factory.made) == 10, "nothing is begun behind that"


async def test_each_episodes_seed_can_go_to_the_engine(tokenizer: Any) -> None:
    async with serving(tokenizer, look) as (engine, served):
        [seeded] = await play(PondFactory(1), served, sampling_seed=True)
        [plain] = await play(PondFactory(1), served)
    assert engine.log[0].sampling_params["sampling_seed"] == seeded.seed == plain.seed
    assert seeded.seed == episode_seed(0, "t-0", 0)
    assert "sampling_seed" not in engine.log[1].sampling_params


@pytest.mark.parametrize(
    ("routed", "affinity", "shared"), [(True, 1, 1), (True, 4, 4), (False, 4, 1)]
)
async def test_samples_of_a_task_share_a_key_behind_a_router(
    tokenizer: Any, routed: bool, affinity: int, shared: int
) -> None:
    """`shared`: how many samples have one key."""
    template, factory = ChatTemplate(tokenizer), PondFactory(1)
    settings = RunSettings(samples=6, affinity=affinity, sampling_params={"temperature": 1.0})
    async with EmbeddedEngine(tokenizer, look) as engine, router_over(engine.url) as router:
        url = router if routed else engine.url
        calls = Engine(EngineConfig(engine=url, vocab_size=len(tokenizer)))
        async with Model(calls, template, get_parser("hermes", template.encoder.control)) as model:
            runner = Runner(factory, lambda: agent(model, verify="off"), settings)
            await runner.run(factory.tasks("test"), lambda episode: None)
    keys = Counter(entry.routing_key for entry in engine.log)
    assert keys == Counter(f"pond/t-0#{sample - sample % shared}" for sample in range(6))


async def test_other_sessions_keep_their_own_key(tokenizer: Any) -> None:
    """A server that one episode starts would send the requests of all to its worker."""
    ROUTING_KEY.set(("first", "group"))
    async with (
        EmbeddedEngine(tokenizer, lambda seen: Reply("Hi.")) as engine,
        router_over(engine.url) as url,
        client(url, model_info=None, context_length=1000, vocab_size=5000) as calls,
    ):
        for session in ("first", "second"):
            await calls.generate(request(session=session))
    assert [entry.routing_key for entry in engine.log] == ["group", "second"]


# --- callbacks: each sees every episode, and none can harm the run --------------------------------


async def play_with(
    tokenizer: Any, callbacks: Sequence[Callback], on_episode: Any = lambda episode: None
) -> None:
    factory = PondFactory(3)
    async with serving(tokenizer, look) as (_, served):
        played = runner(factory, served, callbacks, samples=2, concurrency=3)
        await played.run(factory.tasks("test"), on_episode)


class Counts(Callback):
    """What it was called with: names of episodes, and how many the summary had."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.at_once: list[int] = []
        self.ends: list[int] = []

    def on_episode(self, episode: Episode, summary: Summary) -> None:
        self.seen.append((episode.task_id, episode.sample))
        self.at_once.append(summary.episodes)

    def on_summary(self, summary: Summary) -> None:
        self.ends.append(summary.episodes)


class AsyncCounts(Counts):
    async def on_episode(self, *args: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().on_episode(*args)

    async def on_summary(self, *args: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().on_summary(*args)


async def test_each_sees_every_episode_after_it_is_stored(tokenizer: Any) -> None:
    stored: list[tuple[str, int]] = []
    counts, later = Counts(), AsyncCounts()
    store = lambda episode: stored.append((episode.task_id, episode.sample))
    await play_with(tokenizer, [later, counts], store)
    assert sorted(stored) == [(f"t-{n}", s) for n in range(3) for s in (0, 1)]
    assert vars(counts) == vars(later)
    assert vars(counts) == {"seen": stored, "at_once": [1, 2, 3, 4, 5, 6], "ends": [6]}


@pytest.mark.parametrize(
    "raised", [ZeroDivisionError, asyncio.CancelledError, SystemExit, GeneratorExit]
)
async def test_a_callback_may_fail(tokenizer: Any, raised: Any, caplog: Any) -> None:
    """That is logged, and nothing is lost."""

    def fails(*args: Any) -> None:
        raise raised

    async def fails_later(*args: Any) -> None:
        raise raised

    methods = {"on_episode": fails, "on_summary": fails_later}
    swapped = {"on_episode": fails_later, "on_summary": fails}
    failing = [type("Failing", (Callback,), each)() for each in (methods, swapped)]
    counts, stored = Counts(), list[Any]()
    with caplog.at_level(logging.ERROR):
        await play_with(tokenizer, [*failing, counts], stored.append)
    assert len(stored) == len(counts.seen) == 6 and counts.ends == [6]
    logged = [record.getMessage() for record in caplog.records]
    assert sum("Failing failed; the run continues" in line for line in logged) == 2 * 7
    assert raised.__name__ in caplog.text


async def test_the_end_of_a_run_that_fails_is_reported_too(tokenizer: Any) -> None:
    counts = Counts()

    def full(episode: Episode) -> None:
        raise UsageError("the disk is full")

    with pytest.raises(UsageError, match="the disk is full"):
        await play_with(tokenizer, [counts], full)
    assert (counts.seen, counts.ends) == ([], [0])


@stands_for("wandb.sdk.wandb_run:Run", own="__init__ lines closed")
class WandbRun:
    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.closed = 0

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.lines.append((data, step))

    def finish(self) -> None:
        self.closed += 1


@stands_for("wandb:init")
def wandb_init(*, project: str | None = None) -> WandbRun:
    return WandbRun()


async def test_the_documented_example_runs(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"wandb": {"init": wandb_init}})
    page = (ROOT / "docs" / "callbacks.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    factory = PondFactory(3)
    async with serving(tokenizer, look) as (_, served):
        names: dict[str, Any] = {"factory": factory, "make_agent": lambda: agent(served)}
        exec(compile(block, "callbacks.md", "exec", dont_inherit=True), names)
        await names["runner"].run(factory.tasks("test"), lambda episode: None)
    [callback] = names["runner"]._callbacks
    assert [step for _, step in callback.run.lines] == list(range(1, 13))
    passed = sum(data["reward"] == 1.0 for data, _ in callback.run.lines)
    assert callback.run.summary == {"pass_rate": passed / 12}
    assert callback.run.closed == 1
