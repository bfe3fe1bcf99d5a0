"""Runs without an engine, with an agent that only talks and environments that a test decides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolroll.agents.text_agent import TextAgent
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.environment import (
    Action,
    Environment,
    EnvironmentOptions,
    Observation,
    StepResult,
    Task,
)
from toolroll.rollout.episode import Episode
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Message, Tool

Act = Callable[[str, Task], Any]
"""Gets the method's name and the task; its result, if any, replaces the method's own."""


class Talker(TextAgent):
    """Says the same in every turn."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: Mapping[str, Any],
        session_id: str,
    ) -> AssistantTurn:
        return AssistantTurn(ParsedReply("Go on."), {"role": "assistant", "content": "Go on."})


class Scripted(Environment):
    """Three turns, reward 1.0. Each method first calls `act`."""

    def __init__(self, act: Act, *, blocking: bool = True) -> None:
        self.act, self.blocking = act, blocking
        self.task = Task("none", 0)
        self.turns = self.closed = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self.task = task
        return self._acted("reset", Observation([{"role": "user", "content": "Begin."}]))

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        done = self.turns == 3
        more = StepResult([{"role": "user", "content": "More."}], reward=float(done), done=done)
        return self._acted("step", more)

    def truncated_reward(self) -> float | None:
        return self._acted("truncated_reward", None)

    def metrics(self) -> Mapping[str, float]:
        return self._acted("metrics", {"seen": 1.0})

    def close(self) -> Any:
        self.closed += 1
        return self._acted("close", None)

    def _acted(self, name: str, result: Any) -> Any:
        found = self.act(name, self.task)
        return result if found is None else found


class AsyncScripted(Scripted):
    """The same with methods that are coroutines; `act` returns an awaitable or None."""

    def truncated_reward(self) -> None:
        """None, without a call of `act`."""

    async def reset(self, task: Task, seed: int) -> Observation:  # type: ignore[override]
        return await super().reset(task, seed)  # type: ignore[misc]

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        return await super().step(action)  # type: ignore[misc]

    async def metrics(self) -> Mapping[str, float]:  # type: ignore[override]
        return await super().metrics()  # type: ignore[misc]

    async def close(self) -> None:
        await super().close()

    async def _acted(self, name: str, result: Any) -> Any:
        acting = self.act(name, self.task)
        found = None if acting is None else await acting
        return result if found is None else found


@dataclass
class ScriptedFactory:
    """`count` tasks t-0, t-1, ...; `make_env()` makes the environment of one episode."""

    make_env: Callable[[], Environment]
    count: int = 20
    name: str = "scripted"
    description: str = "for tests"
    splits: tuple[str, ...] = ("test",)
    made: list[Any] = field(default_factory=list)

    def missing(self) -> str | None:
        return None

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"t-{index}", index, split) for index in range(self.count)]

    def make(self, options: EnvironmentOptions) -> Environment:
        env = self.make_env()
        self.made.append(env)
        return env

    def reference(self, task: Task) -> Sequence[Action] | None:
        return None


async def play(
    factory: ScriptedFactory,
    *,
    step_timeout: float | None = None,
    threads: int = 4,
    **settings: Any,
) -> list[Episode]:
    """Return the episodes of a run, sorted by task."""
    episodes: list[Episode] = []
    calls = Threads(threads)
    agent = Talker(calls, step_timeout=step_timeout)
    runner = Runner(
        factory, lambda: agent, RunSettings(**{"concurrency": 4, "pace_gc": False, **settings})
    )
    await runner.run(factory.tasks("test"), episodes.append)
    return sorted(episodes, key=lambda episode: episode.task_index)
