"""`World`: one environment while one episode is played in it: its task and seed, off the event loop, its failures named.

Invariants: blocking `reset` and `step` run in the executor (I8); any exception that is neither an `ActionError` (the model's
fault) nor one of the rollout's own is an `EnvironmentFailure` (I9); nothing is stepped after `done`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter
from typing import Any, TypeVar, cast

from toolroll.rollout.errors import ActionError, EnvironmentFailure, RolloutError, TimeLimitError, UsageError
from toolroll.rollout.types import Action, Environment, Observation, StepResult, Task

T = TypeVar("T")
OffLoop = Callable[..., Awaitable[Any]]


class World:
    """`env`, bound to `task` and `seed`; `off_loop(function, *args)` runs blocking calls, each for at most `time_limit` seconds.

    A blocking call that is over its time keeps its thread until it returns: Python cannot end it.
    """

    def __init__(self, env: Environment, task: Task, seed: int, off_loop: OffLoop, time_limit: float | None = None) -> None:
        self.env = env
        self.task = task
        self.seed = seed
        self.seconds = 0.0
        self.done = False
        self._off_loop = off_loop
        self._time_limit = time_limit

    async def reset(self, task_index: int | None = None) -> Observation:
        """Begin the task; `task_index` is the published argument, and is the task's own."""
        return await self._call(self.env.reset, self.task, self.seed)

    async def step(self, action: Action) -> StepResult:
        """Execute `action`; raises `ActionError` where the model is at fault."""
        if self.done:
            raise EnvironmentFailure("step was called after the episode was done")
        result = await self._call(self.env.step, action)
        self.done = result.done
        return result

    async def verdict(self) -> float | None:
        """The environment's reward for an episode that ran out of steps or of context."""
        return await self._call(self.env.verdict)

    def metrics(self) -> Mapping[str, float]:
        """The environment's numbers."""
        return {**self.env.metrics(), "env_seconds": self.seconds}

    async def close(self) -> None:
        """Close the environment."""
        await self._call(self.env.close)

    async def _call(self, function: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        began = perf_counter()
        limit = asyncio.timeout(self._time_limit)
        try:
            async with limit:
                if self.env.blocking and not inspect.iscoroutinefunction(function):
                    result = await self._off_loop(function, *args)
                else:
                    result = function(*args)
                if inspect.isawaitable(result):
                    result = await result
        except (ActionError, RolloutError, UsageError):
            raise
        except Exception as error:
            where = f"{type(self.env).__name__}.{function.__name__}"
            if limit.expired():
                raise TimeLimitError(f"{where} took more than {self._time_limit:g} s") from error
            raise EnvironmentFailure(f"{where} failed: {type(error).__name__}: {error}") from error
        finally:
            self.seconds += perf_counter() - began
        return cast(T, result)
