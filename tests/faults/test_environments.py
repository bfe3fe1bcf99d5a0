"""Misbehaving environments next to good ones: a fault is its own episode's and nobody else's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from support.episodes import agent, judge_tokens, serving
from support.faults.size import FULL, sampled
from support.faults.tally import Tally, contents
from support.listed_environment import TOOL
from support.loop_clock import skip
from support.toy_environment import Pond, PondFactory, look

from toolroll.rollout.environment import Action, EnvironmentOptions, Observation, StepResult, Task
from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.runner import Runner, session_id
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Status, StopReason

pytestmark = pytest.mark.faults

PARAMS = {"temperature": 1.0, "max_new_tokens": 256}
STEP_TIMEOUT = 100_000.0
"""Seconds, more than a test has. They pass at once (`let_time_pass`) when all faults hang."""
PONDS = 40 if FULL else 15
HARMLESS = ("close", "aclose", "metrics")
"""Places at which a failure takes nothing from the episode."""

Wrong = Callable[["Trouble"], Any]
"""What happens instead of the right answer: it raises, or returns the wrong answer."""


class Trouble(Pond):
    """A pond. If its task names what is `wrong`, that happens at its place: reset, step, astep,
    truncated_reward, metrics, close or aclose. `astep` and `aclose` are coroutines on the event
    loop. `hanging` holds those that hang at the moment."""

    def __init__(self, hanging: set[Trouble]) -> None:
        super().__init__()
        self.hanging, self.place = hanging, ""

    def reset(self, task: Task, seed: int) -> Observation:
        self.place, self.wrong = WRONG.get(str(task.data.get("wrong")), ("", returning(None)))
        return self._maybe("reset", super().reset(task, seed))

    def step(self, action: Action) -> StepResult:
        right = super().step(action)
        return self._maybe("astep", self._maybe("step", right))

    def truncated_reward(self) -> float | None:
        return self._maybe("truncated_reward", 0.0)

    def metrics(self) -> Mapping[str, float]:
        return self._maybe("metrics", super().metrics())

    def close(self) -> None:
        return self._maybe("aclose", self._maybe("close", None))

    def _maybe(self, place: str, right: Any) -> Any:
        if place != self.place:
            return right
        return self._awaited() if place in ("astep", "aclose") else self.wrong(self)

    async def _awaited(self) -> Any:
        found = self.wrong(self)
        return await found if asyncio.iscoroutine(found) else found


FIRST = "Please look around 3 times. This is pond trouble, day 0."


def raising(error: Callable[[], BaseException]) -> Wrong:
    def wrong(_: Trouble) -> Any:
        raise error()

    return wrong


def returning(value: Any) -> Wrong:
    return lambda _: value


class _Custom(BaseException):
    pass


class _EvilText(Exception):
    def __str__(self) -> str:
        raise self.args[0]


class _EvilRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def _deep(n: int) -> int:
    return _deep(n + 1) + 1


def _nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


def _cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return found


async def _await_cancelled() -> None:
    task = asyncio.ensure_future(asyncio.sleep(3600))
    task.cancel()
    await task


async def _scope() -> None:
    async with asyncio.timeout(0):
        await asyncio.Event().wait()


async def _group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.Event().wait())
        raise ValueError("in a group")


async def _sleeping(trouble: Trouble) -> None:
    trouble.hanging.add(trouble)
    try:
        await asyncio.Event().wait()
    finally:
        trouble.hanging.discard(trouble)


def _run(_: Trouble) -> Any:
    work = _await_cancelled()
    try:
        return asyncio.run(work)
    finally:
        work.close()  # `asyncio.run` refuses it on a thread whose loop is running


RAISED: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("bad"),
    "SystemExit 0": lambda: SystemExit(0),
    "SystemExit 1": lambda: SystemExit(1),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": lambda: StopIteration(1),
    "StopAsyncIteration": StopAsyncIteration,
    "MemoryError": MemoryError,
    "RecursionError": lambda: RecursionError("too deep"),
    "TimeoutError": TimeoutError,
    "BaseException": lambda: _Custom("custom"),
    "group": lambda: BaseExceptionGroup("group", [KeyboardInterrupt(), SystemExit(0)]),
    "no text": lambda: _EvilText(RuntimeError("no text")),
    "exits if shown": lambda: _EvilText(SystemExit(0)),
    "long text": lambda: ValueError("x" * 5_000_000),
    "surrogates": lambda: ValueError("\ud800 \x00 \udfff"),
}
EVERYWHERE = (
    *("SystemExit 0", "KeyboardInterrupt", "GeneratorExit", "CancelledError"),
    *("no text", "exits if shown", "ValueError"),
)

# Untyped: their arguments are wrong on purpose.
_observation: Any = Observation
_step: Any = StepResult
_FIRST = [{"role": "user", "content": FIRST}]
_info = lambda info: ("step", returning(_step((), 1.0, True, info=info)))
_reward = lambda reward: ("step", returning(_step((), reward, True)))
_message = lambda message: ("step", returning(_step([message])))
_content = lambda content: _message({"role": "user", "content": content})
_reset = lambda *observed: ("reset", returning(_observation(*observed)))
_metrics = lambda metrics: ("metrics", returning(metrics))

WRONG: dict[str, tuple[str, Wrong]] = {
    **{f"step raises {name}": ("step", raising(error)) for name, error in RAISED.items()},
    **{f"async step raises {name}": ("astep", raising(error)) for name, error in RAISED.items()},
    **{
        f"{place} raises {name}": (place, raising(RAISED[name]))
        for place in ("reset", "close", "aclose", "metrics")
        for name in EVERYWHERE
    },
    "step recurses": ("step", lambda _: _deep(0)),
    "step runs a loop of its own": ("step", _run),
    "async step runs a loop of its own": ("astep", _run),
    "async step awaits a cancelled task": ("astep", lambda _: _await_cancelled()),
    "async step ends a scope": ("astep", lambda _: _scope()),
    "async step fails in a group": ("astep", lambda _: _group()),
    "async step hangs": ("astep", _sleeping),
    "async close hangs": ("aclose", _sleeping),
    "step returns None": ("step", returning(None)),
    "step returns a tuple": ("step", returning(("seen", 1.0, True, {}))),
    "reset returns None": ("reset", returning(None)),
    "reset returns text": ("reset", returning("Hello.")),
    "reset has no messages": _reset([]),
    "tools are a number": _reset(_FIRST, 5),
    "tools are read-only": _reset(_FIRST, [MappingProxyType(TOOL)]),
    "info is read-only": _info(MappingProxyType({"a": MappingProxyType({})})),
    "tools hold None": _reset(_FIRST, [None]),
    "messages are a number": _reset(5),
    "first info is None": _reset(_FIRST, [TOOL], None),
    "info is None": _info(None),
    "info is a list": _info([1]),
    "info is in itself": _info(_cyclic()),
    "info is deep": _info({"deep": _nested(3000)}),
    "info cannot be shown": _info({"x": _EvilRepr()}),
    "info has odd keys": _info({(1, 2): b"\xff", 3: {4, 5}}),
    "info has surrogates": _info({"\ud800": "\udfff"}),
    "info has huge numbers": _info({"n": 10**400, "f": math.inf}),
    "reward is NaN": _reward(math.nan),
    "reward is infinite": _reward(math.inf),
    "reward is text": _reward("1.0"),
    "reward is huge": _reward(10**400),
    "reward is a list": _reward([1.0]),
    "a message is None": _message(None),
    "a message has no role": _message({"content": "x"}),
    "a message's role is unknown": _message({"role": "alien", "content": "x"}),
    "a call is not answered": _content("x"),
    "content is a number": _content(5),
    "content is bytes": _content(b"x"),
    "content is an image": _content([{"type": "image_url", "image_url": {"url": "data:,"}}]),
    "the observation is 3 MB": _reset(
        [{"role": "user", "content": FIRST + " x" * 1_500_000}], [TOOL]
    ),
    "metrics are NaN": _metrics({"seen": math.nan}),
    "metrics are None": _metrics(None),
    "a metric is None": _metrics({"seen": None}),
    "a metric is text": _metrics({"seen": "many"}),
    "a metric is huge": _metrics({"seen": 10**400}),
    "a metric's name is a number": _metrics({5: 1.0}),
    "metrics are a list": _metrics([1.0]),
}


class TroubledFactory(PondFactory):
    """Ponds, and after each of them a task of `wrongs` until these are used up."""

    def __init__(self, wrongs: Sequence[str], count: int) -> None:
        super().__init__(count)
        self.wrongs = list(wrongs)
        self.hanging: set[Trouble] = set()

    def tasks(self, split: str) -> Sequence[Task]:
        ponds = list(super().tasks(split))
        bad = [
            Task(f"bad-{n}", len(ponds) + n, split, {"looks": 3, "wrong": wrong})
            for n, wrong in enumerate(self.wrongs)
        ]
        mixed = [task for pair in zip(bad, ponds, strict=False) for task in pair]
        return [*mixed, *bad[len(ponds) :], *ponds[len(bad) :]]

    def make(self, options: EnvironmentOptions) -> Any:
        return Trouble(self.hanging)


async def play(
    tokenizer: Any, wrongs: Sequence[str], ponds: int, concurrency: int
) -> list[Episode]:
    """Play `ponds` good tasks and one for each of `wrongs`; judge the tokens of each episode."""
    factory = TroubledFactory(wrongs, ponds)
    found: list[Episode] = []
    async with serving(tokenizer, look, max_resumes=0) as (engine, served):

        def make() -> Any:
            made = agent(served)
            made.step_timeout = STEP_TIMEOUT
            return made

        settings = RunSettings(sampling_params=PARAMS, concurrency=concurrency, max_turns=8)
        tasks = factory.tasks("test")
        async with asyncio.TaskGroup() as group:
            run = group.create_task(Runner(factory, make, settings).run(tasks, found.append))
            group.create_task(
                let_time_pass(
                    run, lambda: len(factory.hanging) == min(concurrency, len(tasks) - len(found))
                )
            )
        for episode in found:
            key = session_id(factory.name, episode.task_id, episode.sample)
            judge_tokens(episode.result.trajectories, engine, key)
    return found


async def let_time_pass(run: asyncio.Task[None], all_hang: Callable[[], bool]) -> None:
    """Move the clock on whenever all episodes that are played hang, until the run ends."""
    while not run.done():
        if all_hang():
            skip(STEP_TIMEOUT + 1)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("concurrency", [2, 16])
async def test_every_fault_is_its_own_episodes(
    tokenizer: Any, tally: Tally, concurrency: int, caplog: pytest.LogCaptureFixture
) -> None:
    names, ponds = sampled(WRONG, 30), PONDS
    keys = [(task.id, 0) for task in TroubledFactory(names, ponds).tasks("test")]
    alone = contents(await play(tokenizer, [], ponds, concurrency))
    found = await play(tokenizer, names, ponds, concurrency)
    tally.tried(len(names))
    tally.played(found, keys, alone)
    tally.texts(caplog.text)
    tally.check()
    assert len(WRONG) >= 60
    wrong = {f"bad-{n}": name for n, name in enumerate(names)}
    ends = {wrong[e.task_id]: e.result for e in found if e.task_id in wrong}
    failed = {name for name, end in ends.items() if end.status is not Status.COMPLETED}
    assert not failed & {name for name in names if WRONG[name][0] in HARMLESS}
    odd = {name for name, end in ends.items() if end.stop_reason is StopReason.INTERNAL_ERROR}
    assert not odd, {name: ends[name].info.get("error") for name in odd}
