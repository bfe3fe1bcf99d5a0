"""Failing requests and a killed worker behind each router. The workers are embedded engines."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from support.episodes import agent, judge_tokens, opened_model
from support.processes import Server
from support.servers import Router, router
from support.toy_environment import PondFactory, look

from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Status
from toolroll.testing import EmbeddedEngine, Fault, serve_in_thread

EPISODES = 24
PARAMS = {"temperature": 1.0, "max_new_tokens": 256}
FAULTS = {
    3: Fault(status=503, body=b"busy"),
    5: Fault(status=500, body=b"boom"),
    8: Fault(drop=True),
    11: Fault(status=429, body=b"full"),
}
"""By the number of the request at its worker."""
KILLED_AT = 14


@contextmanager
def over(workers: list[EmbeddedEngine], kind: Router, log_folder: Path) -> Iterator[Server]:
    """A router over `workers`, each in a thread."""
    with ExitStack() as stack:
        urls = [stack.enter_context(serve_in_thread(worker)).url for worker in workers]
        # the defaults of sglang-router keep a dead worker for three minutes
        flags = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        front = router(urls, log_folder, kind=kind, flags=flags, name=f"{kind}-faults")
        yield stack.enter_context(front)


async def play(tokenizer: Any, url: str, episodes: list[Episode]) -> None:
    factory = PondFactory(EPISODES)
    settings = RunSettings(sampling_params=PARAMS, concurrency=8)
    async with opened_model(url, tokenizer, config={"backoff": 0.01}) as model:
        runner = Runner(factory, lambda: agent(model, verify="off"), settings)
        await runner.run(factory.tasks("test"), episodes.append)


def check(episodes: list[Episode], workers: list[EmbeddedEngine]) -> None:
    """Every episode is complete, and every token was sampled once for it."""
    assert len({episode.task_id for episode in episodes}) == EPISODES == len(episodes)
    log: Any = SimpleNamespace(log=[entry for worker in workers for entry in worker.log], killed=0)
    for episode in episodes:
        assert episode.result.status is Status.COMPLETED, episode.result.info
        name = f"pond/{episode.task_id}#0"
        answered = [entry for entry in log.log if entry.routing_key == name and entry.output_ids]
        trained = sum(len(path.turns) for path in episode.result.trajectories)
        judge_tokens(episode.result.trajectories, log, name, refused=len(answered) - trained)


@pytest.mark.parametrize("kind", get_args(Router))
async def test_failing_requests_and_a_killed_worker_cost_no_episode(
    tokenizer: Any, kind: Router, log_folder: Path
) -> None:
    episodes: list[Episode] = []
    killing: list[asyncio.Task[None]] = []
    one_kill = threading.Lock()

    def fault_or_kill(worker: int, request: Any) -> Fault | None:
        # The router chooses which worker comes first to this request. It is killed in its thread.
        if request.index == KILLED_AT and one_kill.acquire(blocking=False):
            killing.append(asyncio.get_running_loop().create_task(workers[worker].kill()))
        return FAULTS.get(request.index)

    workers = [
        EmbeddedEngine(tokenizer, look, latency=0.05, faults=partial(fault_or_kill, worker))
        for worker in range(2)
    ]
    with over(workers, kind, log_folder) as front:
        await play(tokenizer, front.url, episodes)
    check(episodes, workers)
    assert killing
    assert [sum(entry.faulted for entry in worker.log) for worker in workers] == [len(FAULTS)] * 2
