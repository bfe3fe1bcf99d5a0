"""The desk's tasks played by references with mistakes, whatever session id an adapter uses."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from toolroll.rollout.environment import Environment, EnvironmentOptions, Observation
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.runs.runner import session_id
from toolroll.testing import PolicyRequest, play_references

DESK = load_environment("desk")
TASKS = DESK.tasks("test")


@cache
def openings() -> dict[str, str]:
    """The user's first message by the task's id, of the tasks that it tells apart."""

    async def read() -> dict[str, str]:
        found: dict[str, str] = {}
        for task in TASKS:
            environment: Environment = DESK.make(EnvironmentOptions())
            seen = environment.reset(task, 0)
            observation: Observation = seen if isinstance(seen, Observation) else await seen
            found[task.id] = str(observation.messages[-1]["content"])
        return found

    with ThreadPoolExecutor(1) as threads:  # the caller's may run an event loop
        found = threads.submit(asyncio.run, read()).result()
    every = "\n".join(found.values())
    return {one: text for one, text in found.items() if every.count(text) == 1}


def known_tasks() -> list[int]:
    """The indices of the tasks that `ByTask` plays."""
    return [task.index for task in TASKS if task.id in openings()]


class ByTask:
    """A policy that knows the task by its opening. The sessions of a task play its samples in the
    order in which they begin; a retried session goes on where it was.
    """

    def __init__(self, samples: int = 1, mistakes: float = 0.5) -> None:
        self._lines = play_references(DESK, TASKS, samples=samples, mistakes=mistakes)
        self._samples = samples
        self._begun: Counter[str] = Counter()
        self._sessions: dict[str, Sequence[str]] = {}
        self._openings = openings()

    def __call__(self, request: PolicyRequest) -> str:
        if request.routing_key not in self._sessions:
            task = next(one for one, text in self._openings.items() if text in request.text)
            sample = self._begun[task] % self._samples
            self._begun[task] += 1
            self._sessions[request.routing_key] = self._lines[session_id(DESK.name, task, sample)]
        lines = self._sessions[request.routing_key]
        return lines[request.call] if request.call < len(lines) else "Goodbye."
