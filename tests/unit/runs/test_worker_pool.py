"""Episodes dealt out to workers: none lost and none twice, whichever worker dies."""

import asyncio
from typing import Any

import pytest
from support.results import episode
from support.toy_environment import PondFactory

from toolroll.evaluation import worker_pool as spreading
from toolroll.evaluation.worker_pool import (
    WorkerDiedError,
    WorkerStalledError,
    play_on_workers,
    split_concurrency,
)
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import RolloutError
from toolroll.rollout.runs.runner import remaining

Key = tuple[str, int]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause before a worker's episodes are given out again."""
    monkeypatch.setattr(spreading, "_PAUSE", 0.0)


class Mortal:
    """A player that is gone when it is asked for a task in `deadly`, so many times."""

    def __init__(
        self, deadly: dict[str, int] | None = None, error: type[WorkerDiedError] = WorkerDiedError
    ) -> None:
        self._error = error
        self.asked: list[Key] = []
        self.most = self._now = 0
        self._deadly = dict(deadly or {})

    async def play(self, key: Key) -> Episode:
        self.asked.append(key)
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        if self._deadly.get(key[0], 0):
            self._deadly[key[0]] -= 1
            raise self._error("killed")
        return episode(*key)


def test_what_is_left_over_comes_sample_by_sample() -> None:
    tasks = PondFactory(3).tasks("test")
    left = [("t-0", 0), ("t-2", 0), ("t-0", 1), ("t-1", 1), ("t-2", 1)]
    assert remaining(tasks, 2, {("t-1", 0)}) == left


@pytest.mark.parametrize(
    ("concurrency", "players", "expected"),
    [(8, 3, [3, 3, 2]), (2, 4, [1, 1]), (5, 1, [5]), (6, 2, [3, 3])],
)
def test_shares_add_up_and_none_is_zero(concurrency: int, players: int, expected: Any) -> None:
    assert split_concurrency(concurrency, players) == expected


@pytest.mark.usefixtures("impatient")
async def test_what_a_dead_player_had_is_given_out_again() -> None:
    todo, found = [(f"t-{number}", 0) for number in range(40)], list[Key]()
    first, second = (Mortal({"t-3": 2, "t-20": 9}) for _ in range(2))
    store = lambda one: found.append((one.task_id, one.sample))
    await play_on_workers(todo, [(first.play, 3), (second.play, 2)], store)
    assert sorted(found) == sorted(todo), "each of them once"
    assert (first.most, second.most) == (3, 2)
    assert len(first.asked) + len(second.asked) == 40 + 2 + 9


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (WorkerDiedError, "is there enough memory"),
        (WorkerStalledError, "10 of them had a blocked event loop: the environment"),
    ],
)
async def test_a_deadly_episode_ends_the_run(error: type[WorkerDiedError], why: str) -> None:
    player = Mortal({"t-0": 99}, error)
    words = f"10 workers died while playing task t-0, sample 1: {why}"
    with pytest.raises(RolloutError, match=words):
        await play_on_workers([("t-0", 1)], [(player.play, 1)], lambda one: None)
