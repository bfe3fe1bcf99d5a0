"""Callbacks of a runner: each sees every episode, and none can harm the run."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
from support.episodes import agent, serving
from support.source import ROOT
from support.standins import stand_in, stands_for
from support.toy_environment import PondFactory, look

from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.callbacks import Callback
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.settings import RunSettings

SETTINGS = RunSettings(
    sampling_params={"temperature": 1.0, "max_new_tokens": 256}, samples=2, concurrency=3
)


async def play(
    tokenizer: Any, callbacks: Sequence[Callback], on_episode: Any = lambda episode: None
) -> None:
    factory = PondFactory(3)
    async with serving(tokenizer, look) as (_, served):
        runner = Runner(factory, lambda: agent(served), SETTINGS, callbacks=callbacks)
        await runner.run(factory.tasks("test"), on_episode)


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


class Failing(Callback):
    def on_episode(self, episode: Episode, summary: Summary) -> None:
        raise ZeroDivisionError("of the callback")

    async def on_summary(self, summary: Summary) -> None:
        raise KeyError("also async")


async def test_each_sees_every_episode_after_it_is_stored(tokenizer: Any) -> None:
    stored: list[tuple[str, int]] = []
    counts, later = Counts(), AsyncCounts()
    store = lambda episode: stored.append((episode.task_id, episode.sample))
    await play(tokenizer, [later, counts], store)
    assert sorted(stored) == [(f"t-{n}", s) for n in range(3) for s in (0, 1)]
    assert vars(counts) == vars(later)
    assert vars(counts) == {"seen": stored, "at_once": [1, 2, 3, 4, 5, 6], "ends": [6]}


async def test_a_callback_may_fail(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """That is logged, and nothing is lost."""
    stored: list[Episode] = []
    counts = Counts()
    with caplog.at_level(logging.ERROR):
        await play(tokenizer, [Failing(), counts], stored.append)
    assert len(stored) == len(counts.seen) == 6
    logged = [record for record in caplog.records if "Failing failed" in record.getMessage()]
    errors = [record.exc_info and record.exc_info[0] for record in logged]
    assert errors == [ZeroDivisionError] * 6 + [KeyError]


async def test_the_end_of_a_run_that_fails_is_reported_too(tokenizer: Any) -> None:
    counts = Counts()

    def full(episode: Episode) -> None:
        raise UsageError("the disk is full")

    with pytest.RaisesGroup(UsageError, allow_unwrapped=True, flatten_subgroups=True):
        await play(tokenizer, [counts], full)
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


@pytest.mark.parametrize("raised", [asyncio.CancelledError, SystemExit, GeneratorExit])
async def test_a_callback_that_exits_does_not_end_the_run(
    tokenizer: Any, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Exits(Callback):
        async def on_episode(self, episode: Episode, summary: Summary) -> None:
            raise raised

        def on_summary(self, summary: Summary) -> None:
            raise raised

    counts, stored = Counts(), list[Any]()
    with caplog.at_level(logging.ERROR):
        await play(tokenizer, [Exits(), counts], stored.append)
    assert len(stored) == len(counts.seen) == 6 and counts.ends == [6]
    assert caplog.text.count("Exits failed; the run continues") == 7
