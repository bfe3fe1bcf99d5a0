"""`EnvironmentPlayer`: resets and steps one environment, and records the results and their
duration.

It is for checks of environments, and needs neither an engine nor an agent. Each blocking call runs
in a new thread, because in a run, the calls of one episode may also come from different threads.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from toolroll.rollout.errors import (
    ActionError,
    EnvironmentFailure,
    ToolrollError,
    UsageError,
    message_of,
)
from toolroll.rollout.runs.environment_file import error_line
from toolroll.rollout.runtime.foreign import ForeignExitError, guarded
from toolroll.rollout.runtime.jsonable import finite, plain, shown
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import Action, Environment, Observation, StepResult, Task, Tool

Entry = Mapping[str, Any]
"""The result of one reset or step, after a round trip through JSON."""


class BrokenError(ToolrollError):
    """Raised if an environment raises an error or returns an invalid value."""


class EnvironmentPlayer:
    """Steps `env` through one episode.

    `transcript` has one entry per call, `seconds` has the duration of each call, and `on_loop` has
    the longest time for which each call blocked the event loop. A call may take at most
    `time_limit` seconds.
    """

    def __init__(self, env: Environment, time_limit: float) -> None:
        self.env = env
        self.time_limit = time_limit
        self.transcript: list[Entry] = []
        self.seconds: list[float] = []
        self.on_loop: list[float] = []
        self.tools: Sequence[Tool] = ()
        self.done = False
        self._rewards: list[float] = []
        self._name = type(env).__name__
        self._last_thread = 0

    @property
    def reward(self) -> float | None:
        """The reward of the episode so far. None if no step returned a reward."""
        if not self._rewards:
            return None
        return sum(self._rewards) if self.env.reward_mode == "sum" else self._rewards[-1]

    async def reset(self, task: Task, seed: int) -> None:
        """Start `task`. An `ActionError` or `UsageError` of the environment is raised unchanged.

        Raise `BrokenError` for any other error, or if the result is not valid.
        """
        found = await self._call("reset", task, seed)
        if not isinstance(found, Observation):
            raise BrokenError(f"reset returned {shown(found)}, and must return an Observation")
        self.tools = found.tools
        self.transcript.append(plain({"messages": found.messages, "tools": found.tools}))

    async def step(self, action: Action) -> Entry:
        """Execute `action` and return its transcript entry. An `ActionError` becomes an entry. A
        `UsageError` of the environment is raised unchanged.

        Raise `BrokenError` for any other error, or if the result is not valid.
        """
        calls = tuple(
            call.with_id(f"call_{len(self.transcript)}_{at}")
            for at, call in enumerate(action.tool_calls)
        )
        try:
            found = await self._call("step", Action(action.content, calls))
        except ActionError as error:
            entry: Entry = {"error": message_of(error)}
        else:
            entry = self._entry(found, [call.id for call in calls])
        self.transcript.append(entry)
        return entry

    async def close(self) -> None:
        """Close the environment. Raise `BrokenError` if this fails."""
        try:
            await self._call("close")
        except (ActionError, UsageError) as error:
            raise BrokenError(f"close raised {type(error).__name__}: {error}") from error

    def _entry(self, found: Any, calls: Sequence[str]) -> Entry:
        if not isinstance(found, StepResult):
            raise BrokenError(f"step returned {shown(found)}, and must return a StepResult")
        if found.reward is not None:
            reward = finite(found.reward)
            if reward is None:
                raise BrokenError(
                    f"step returned the reward {shown(found.reward)}, which is not a finite number"
                )
            self._rewards.append(reward)
        self.done = bool(found.done)
        self.tools = self.tools if found.tools is None else found.tools
        answered = [message.get("tool_call_id") for message in found.messages]
        if not self.done and not set(calls) <= set(answered):
            raise BrokenError(
                "step returned no tool message for a call: its tool_call_id is missing"
            )
        entry: Entry = plain(
            {"messages": found.messages, "reward": found.reward, "done": self.done}
        )
        return entry

    async def _call(self, method: str, *args: Any) -> Any:
        began = perf_counter()
        self.on_loop.append(0.0)
        limit = asyncio.timeout(self.time_limit)
        try:
            async with limit:
                with guarded():
                    return await self._result(getattr(self.env, method), *args)
        except (ActionError, UsageError):
            raise
        except Exception as error:
            if limit.expired():
                said = f"{method} took more than {self.time_limit:g} s"
                raise BrokenError(said) from error
            if isinstance(error, ForeignExitError) and error.__cause__ is not None:
                raise BrokenError(f"{method} raised {error.__cause__!r}") from error
            if isinstance(error, EnvironmentFailure):  # its message names the file and the line
                raise BrokenError(f"{method} failed: {message_of(error)}") from error
            raise BrokenError(f"{method} failed: {error_line(error)}") from error
        finally:
            self.seconds.append(perf_counter() - began)

    async def _result(self, function: Any, *args: Any) -> Any:
        if self.env.blocking and not inspect.iscoroutinefunction(function):
            found = await Threads(1).run_in_thread(self._in_another_thread, function, *args)
        else:
            began = perf_counter()
            found = function(*args)
            self.on_loop[-1] = perf_counter() - began
        if not inspect.isawaitable(found):
            return found
        watched = _Watched(found)
        try:
            return await watched
        finally:
            self.on_loop[-1] = max(self.on_loop[-1], watched.longest)

    def _in_another_thread(self, function: Any, *args: Any) -> Any:
        """Call `function` in a thread whose ident differs from the ident of the last call's thread.

        Objects that belong to one thread, such as SQLite's connections, compare idents. But a new
        thread may get the ident of a thread that has ended. Such an object would then work in the
        wrong thread. In this case, start a second thread: while the first one runs, the second gets
        a different ident.
        """
        ident = threading.get_ident()
        if ident != self._last_thread:
            self._last_thread = ident
            with guarded():
                return function(*args)
        future: Future[Any] = Future()
        threading.Thread(
            target=self._settle, args=(future, function, *args), name="toolroll", daemon=True
        ).start()
        return future.result()

    def _settle(self, future: Future[Any], function: Any, *args: Any) -> None:
        try:
            future.set_result(self._in_another_thread(function, *args))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for it
            future.set_exception(error)


class _Watched:
    """Awaits `awaitable`. `longest`: the longest time in seconds that it blocked the event loop."""

    def __init__(self, awaitable: Any) -> None:
        self.longest = 0.0
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, None, Any]:
        inner = self._awaitable.__await__()
        while True:
            began = perf_counter()
            try:
                waited = next(inner)
            except StopIteration as end:
                return end.value
            finally:
                self.longest = max(self.longest, perf_counter() - began)
            yield waited
