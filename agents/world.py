"""`World`: one environment while one episode is played in it: its task and seed, off the event loop, its failures named.

Invariants: blocking `reset` and `step` run in the executor (I8); any exception that is neither an `ActionError` (the model's
fault) nor one of the rollout's own is an `EnvironmentFailure` (I9); nothing is stepped after `done`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, cast

from toolroll.agents.checked import checked_observation, checked_reward, checked_step
from toolroll.rollout.errors import ActionError, EnvironmentFailure, RolloutError, TimeLimitError, UsageError
from toolroll.rollout.types import Action, Environment, Observation, StepResult, Task

logger = logging.getLogger(__name__)

T = TypeVar("T")
OffLoop = Callable[..., Awaitable[Any]]

_CLOSE_LIMIT = 10.0


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
        self._metrics: Mapping[str, float] = {}
        self._name = type(env).__name__

    async def reset(self, task_index: int | None = None) -> Observation:
        """Begin the task; `task_index` is the published argument, and is the task's own."""
        return checked_observation(self._name, await self._call(self.env.reset, self.task, self.seed))

    async def step(self, action: Action) -> StepResult:
        """Execute `action`; raises `ActionError` where the model is at fault."""
        if self.done:
            raise EnvironmentFailure("step was called after the episode was done")
        result = checked_step(self._name, await self._call(self.env.step, action), action)
        self.done = result.done
        return result

    async def verdict(self) -> float | None:
        """The environment's reward for an episode that ran out of steps or of context."""
        return checked_reward(f"{self._name}.verdict", await self._call(self.env.verdict))

    def measure(self) -> Exception | None:
        """Take the environment's numbers; an error of that is given back."""
        try:
            self._metrics = dict(self.env.metrics())
        except Exception as error:  # noqa: BLE001 - the environment's border: numbers that fail take nothing from the episode
            logger.warning("the environment of task %s gave no numbers: %s", self.task.id, error)
            return error
        return None

    def metrics(self) -> Mapping[str, float]:
        """The numbers that `measure` took."""
        return {**self._metrics, "env_seconds": self.seconds}

    async def close(self) -> Exception | None:
        """Close the environment; an error of that, which takes nothing from the episode that was played, is given back. A close that
        finds no free thread, or does not end, is waited for no longer than the time limit (10 seconds where there is none)."""
        try:
            await self._call(self.env.close, limit=self._time_limit or _CLOSE_LIMIT)
        except (ActionError, RolloutError, UsageError) as error:
            logger.warning("the environment of task %s was not closed: %s", self.task.id, error)
            return error
        return None

    async def _call(self, function: Callable[..., T | Awaitable[T]], *args: Any, limit: float | None = None) -> T:
        began = perf_counter()
        seconds = limit or self._time_limit
        timeout: asyncio.Timeout | None = None
        try:
            if seconds is None:
                return await self._result(function, *args)
            async with asyncio.timeout(seconds) as timeout:
                return await self._result(function, *args)
        except (ActionError, RolloutError, UsageError):
            raise
        except Exception as error:
            where = f"{type(self.env).__name__}.{function.__name__}"
            if timeout is not None and timeout.expired():
                raise TimeLimitError(f"{where} took more than {seconds:g} s") from error
            raise EnvironmentFailure(f"{where} failed: {type(error).__name__}: {error}{_place(error, type(self.env))}") from error
        finally:
            self.seconds += perf_counter() - began

    async def _result(self, function: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        if self.env.blocking and not inspect.iscoroutinefunction(function):
            result = await self._off_loop(function, *args)
        else:
            result = function(*args)
        return cast(T, await result if inspect.isawaitable(result) else result)


def _place(error: Exception, environment: type) -> str:
    """Where `error` was raised: the innermost line of the environment's own module, else the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(sys.modules.get(environment.__module__), "__file__", None)
    found = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1] if frames else None)
    return "" if found is None else f" ({Path(found.filename).name}, line {found.lineno}, in {found.name})"
