"""`EnvironmentRunner`: calls the environment of one episode, and classifies its failures.

Invariants (I8 and I9: docs/guarantees.md):

- Blocking methods run in threads (I8). Async methods run on the event loop. If the environment sets
  `blocking = False`, all its methods run on the event loop.
- An exception of the environment, including `SystemExit` and `CancelledError`, becomes an
  `EnvironmentFailure` (I9). This rule does not apply to `ActionError` (the model's mistake),
  `UsageError`, any `RolloutError`, or the cancellation of the episode itself.
- A result that is invalid or too large is an `EnvironmentFailure`.
- `step` is never called after `done`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar, cast

from toolroll.agents.loop.environment_results import (
    MOST_BYTES,
    check_size,
    checked_metrics,
    checked_observation,
    checked_reward,
    checked_step,
)
from toolroll.rollout.environment import Action, Environment, Observation, StepResult, Task
from toolroll.rollout.errors import (
    ActionError,
    EnvironmentFailure,
    RolloutError,
    TimeLimitError,
    UsageError,
    message_of,
    place_of,
)
from toolroll.rollout.runtime.foreign import ForeignExitError, call_in_task, guarded, outcome
from toolroll.rollout.runtime.threads import OF_ENVIRONMENT
from toolroll.rollout.runtime.time_limit import pausable

T = TypeVar("T")
RunInThread = Callable[..., Awaitable[Any]]

DRAWN = Task("drawn", cast("int", None))
"""The task of an episode for which the caller chose none: the environment draws it. It has no
index, so an environment that needs one fails, instead of playing task 0.
"""

_CLOSE_LIMIT = 10.0


def chosen_task(task_index: int | None) -> Task:
    """Return the task with this index, or `DRAWN`."""
    return DRAWN if task_index is None else Task(str(task_index), task_index)


class EnvironmentRunner:
    """Calls `env` for one episode with `task` and `seed`. `run_in_thread` (from `Threads`) runs
    blocking calls.

    Each call may take `time_limit` seconds, not counting the wait for a thread. After the limit, a
    blocking call keeps running, because Python cannot stop it. A coroutine that ignores its
    cancellation also keeps running. A result with more than `max_observation_bytes` of text is a
    failure. Raise `UsageError` if the environment's `reward_mode` is unknown.
    """

    def __init__(
        self,
        env: Environment,
        task: Task,
        seed: int,
        run_in_thread: RunInThread,
        time_limit: float | None = None,
        *,
        max_observation_bytes: int = MOST_BYTES,
    ) -> None:
        if env.reward_mode not in ("final", "sum"):
            raise UsageError(
                f"{type(env).__name__}.reward_mode must be 'final' or 'sum', not "
                f"{env.reward_mode!r}"
            )
        self.env = env
        self.task = task
        self.seed = seed
        self.seconds = 0.0
        self.done = False
        self.drawn: dict[str, Any] = {"task_index": None} if task is DRAWN else {}
        """If the caller chose no task: the index of the task that is played, as the info of `reset`
        says it. None if it does not say it.
        """
        self.first: Observation | None = None
        """The result of `reset`, or None before `reset`. The caller may set it to None to free its
        messages and tools.
        """
        self._run_in_thread = run_in_thread
        self._time_limit = time_limit
        self._most_bytes = max_observation_bytes
        self._metrics: Mapping[str, float] = {}
        self._name = type(env).__name__
        self._task: asyncio.Task[Any] | None = None

    async def reset(self, task_index: int | None = None) -> Observation:
        """Start the task. `task_index` has no effect, but hooks written for tau-bench pass it."""
        return self._first(await self._call("reset", self.task, self.seed))

    async def step(self, action: Action) -> StepResult:
        """Execute `action`. Raise `ActionError` if the model made a mistake."""
        with self._step_rules(action):
            return self._stepped(await self._call("step", action), action)

    def reset_now(self) -> Observation:
        """Start the task, and block this thread until it has started. This is for hooks that do not
        use `await`.
        """
        return self._first(self._call_now("reset", self.task, self.seed))

    def step_now(self, action: Action) -> StepResult:
        """Execute `action`, and block this thread until it is done. This is for hooks that do not
        use `await`.
        """
        with self._step_rules(action):
            return self._stepped(self._call_now("step", action), action)

    def _first(self, returned: Any) -> Observation:
        self.first = self._checked(checked_observation, self._name, returned, self._most_bytes)
        for name in self.drawn:
            self.drawn[name] = self.first.info.get(name, self.task.index)
        return self.first

    @contextmanager
    def _step_rules(self, action: Action) -> Iterator[None]:
        """Raise `EnvironmentFailure` if the episode is done. If `step` raises an `ActionError`, the
        model gets the error's text once per call. Raise `EnvironmentFailure` if these texts are too
        long in total.
        """
        if self.done:
            raise EnvironmentFailure("step was called after the episode was done")
        try:
            yield
        except ActionError as error:
            text = {"content": message_of(error, self._most_bytes + 1)}
            where = f"{self._name}.step raised an ActionError and"
            check_size(where, [text] * max(1, len(action.tool_calls)), (), self._most_bytes)
            raise

    def _stepped(self, returned: Any, action: Action) -> StepResult:
        result = self.checked_step(f"{self._name}.step", returned, action)
        self.done = bool(result.done)
        return result

    def checked_step(self, where: str, returned: Any, action: Action) -> StepResult:
        """Return a copy of what the function named `where` returned for `action`. Raise
        `EnvironmentFailure` if it is invalid.
        """
        return self._checked(checked_step, where, returned, action, self._most_bytes)

    async def truncated_reward(self) -> float | None:
        """Return the environment's reward for an episode that the environment did not end (for
        example, because of the step limit).
        """
        return checked_reward(
            f"{self._name}.truncated_reward", await self._call("truncated_reward")
        )

    async def measure(self) -> None:
        """Read the environment's metrics, within the time limit, or 10 seconds if there is none."""
        returned = await self._call("metrics", limit=self._time_limit or _CLOSE_LIMIT)
        self._metrics, wrong = self._checked(checked_metrics, self._name, returned)
        if wrong is not None:
            raise EnvironmentFailure(wrong)

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics that `measure` read, and `env_seconds`."""
        return {**self._metrics, "env_seconds": self.seconds}

    async def close(self) -> None:
        """Close the environment, within the time limit, or 10 seconds if there is none."""
        await self._call("close", limit=self._time_limit or _CLOSE_LIMIT)

    def _checked(self, check: Callable[..., T], where: str, *returned: Any) -> T:
        """Return `check(where, *returned)`. Raise `EnvironmentFailure` if it raises an exception:
        reading what an environment returned may raise any.
        """
        try:
            with guarded():
                return check(where, *returned)
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise EnvironmentFailure(
                f"what {where} returned cannot be read: {_shown(error)}"
            ) from error

    async def _call(self, method: str, *args: Any, limit: float | None = None) -> Any:
        """Call the environment's `method`, with at most `limit` seconds from when it starts to run.
        If it is blocking, it runs in a thread, and else in its own task.
        """
        seconds = limit or self._time_limit
        where = f"{self._name}.{method}"
        timeout = asyncio.timeout(None)

        def begun() -> None:
            if seconds is not None:
                timeout.reschedule(asyncio.get_running_loop().time() + seconds)

        self._task = None
        with self._classified(where, timeout, seconds):
            async with timeout:
                with pausable(timeout), guarded():
                    function = getattr(self.env, method)  # which may be a property
                    if self.env.blocking and not inspect.iscoroutinefunction(function):
                        # In the thread, a `KeyboardInterrupt` is not treated as Ctrl-C.
                        result = await self._run_in_thread(
                            guarded()(function), *args, begun=begun, what=where
                        )
                        if not inspect.isawaitable(result):
                            return result
                        function, args = _same, (result,)
                    else:
                        begun()
                    return await self._on_loop(where, function, *args)

    def _call_now(self, method: str, *args: Any) -> Any:
        """Call the environment's `method` in this thread, without a time limit. Raise `UsageError`
        if it is async.
        """
        where = f"{self._name}.{method}"
        function = getattr(self.env, method)
        message = f"{where} is async, so hooks must await it: write `await env.{method}`"
        if inspect.iscoroutinefunction(function):
            raise UsageError(message)
        with self._classified(where):
            with guarded():
                result = function(*args)
            if inspect.iscoroutine(result):  # a plain method that returns a coroutine
                result.close()
                raise UsageError(message)
            return result

    @contextmanager
    def _classified(
        self, where: str, timeout: asyncio.Timeout | None = None, seconds: float | None = None
    ) -> Iterator[None]:
        """Convert the errors of a call (see the module's invariants), and add the call's duration
        to `self.seconds`. `timeout` is the call's time limit of `seconds`.
        """
        start = perf_counter()
        try:
            yield
        except (ActionError, UsageError):
            raise
        except Exception as error:
            if isinstance(error, RolloutError) and not isinstance(error, ForeignExitError):
                raise
            if timeout is not None and timeout.expired():
                still = self._still_runs()
                raise TimeLimitError(f"{where} took more than {seconds:g} s{still}") from error
            cause = (error.__cause__ if isinstance(error, ForeignExitError) else None) or error
            hint = "; no task was chosen: pass task or task_index" if self.task is DRAWN else ""
            raise EnvironmentFailure(
                f"{where} failed: {_shown(cause)}{_place(cause, type(self.env))}{hint}"
            ) from error
        finally:
            self.seconds += perf_counter() - start

    async def _on_loop(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` in its own task, and keep its changes to context variables."""
        context = contextvars.copy_context()
        name = f"{where} of {self.task.id}"
        context.run(OF_ENVIRONMENT.set, name)
        self._task = asyncio.create_task(call_in_task(function, *args), name=name, context=context)
        try:
            return await outcome(self._task)
        finally:
            for variable, value in context.items():
                if variable is not OF_ENVIRONMENT and variable.get(None) is not value:
                    variable.set(value)

    def _still_runs(self) -> str:
        if self._task is None or self._task.done():
            return ""
        return (
            ", and is still running: its coroutine suppresses CancelledError, which it must not do"
        )


def _same(value: T) -> T:
    return value


def _shown(error: BaseException) -> str:
    text = message_of(error, 1500)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException, environment: type) -> str:
    module = sys.modules.get(environment.__module__)
    return place_of(error, getattr(module, "__file__", None))
