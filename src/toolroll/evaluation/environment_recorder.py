"""`EnvironmentRecorder`: resets and steps one environment, and records the results and their
duration.

It is for checks of environments, and needs neither an engine nor an agent. Each blocking call runs
in a new thread, because in a run, the calls of one episode may also come from different threads.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.rollout.errors import ActionError, message_of
from toolroll.rollout.runtime.foreign import guarded
from toolroll.rollout.runtime.jsonable import plain
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import Action, Environment, Task, Tool

Entry = Mapping[str, Any]
"""The result of one reset or step, after a round trip through JSON."""


class EnvironmentRecorder(EnvironmentRunner):
    """Runs `env` through one episode with `start` and `execute`.

    `transcript` has one entry per call, `durations` has the duration of each call, and `on_loop`
    has the longest time for which each call blocked the event loop, in seconds.
    """

    def __init__(self, env: Environment, task: Task, seed: int, time_limit: float) -> None:
        super().__init__(env, task, seed, self._run_in_new_thread, time_limit)
        self.transcript: list[Entry] = []
        self.durations: list[float] = []
        self.on_loop: list[float] = []
        self.tools: Sequence[Tool] = ()
        self._rewards: list[float] = []
        self._last_thread = 0

    @property
    def reward(self) -> float | None:
        """The reward of the episode so far. None if no step returned a reward."""
        if not self._rewards:
            return None
        return sum(self._rewards) if self.env.reward_mode == "sum" else self._rewards[-1]

    async def start(self) -> None:
        """Reset the environment, and record its observation."""
        observation = await self.reset()
        self.tools = observation.tools
        self.transcript.append(plain({"messages": observation.messages, "tools": self.tools}))

    async def execute(self, action: Action) -> None:
        """Step the environment, and record the result, or the text of its `ActionError`."""
        calls = tuple(
            call.with_id(f"call_{len(self.transcript)}_{position}")
            for position, call in enumerate(action.tool_calls)
        )
        try:
            result = await self.step(Action(action.content, calls))
        except ActionError as error:
            self.transcript.append({"error": message_of(error)})
            return
        if result.reward is not None:
            self._rewards.append(result.reward)
        self.tools = self.tools if result.tools is None else result.tools
        self.transcript.append(
            plain({"messages": result.messages, "reward": result.reward, "done": self.done})
        )

    async def _call(self, method: str, *args: Any, limit: float | None = None) -> Any:
        seconds_before = self.seconds
        self.on_loop.append(0.0)
        try:
            return await super()._call(method, *args, limit=limit)
        finally:
            self.durations.append(self.seconds - seconds_before)

    async def _on_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        return await super()._on_loop(self._measured, function, *args)

    async def _measured(self, function: Callable[..., Any], *args: Any) -> Any:
        start = perf_counter()
        result = function(*args)
        self.on_loop[-1] = perf_counter() - start
        if not inspect.isawaitable(result):
            return result
        watched = _Watched(result)
        try:
            return await watched
        finally:
            self.on_loop[-1] = max(self.on_loop[-1], watched.longest)

    async def _run_in_new_thread(
        self, function: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        return await Threads(1).run_in_thread(self._in_another_thread, function, *args, **named)

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
            start = perf_counter()
            try:
                pending = next(inner)
            except StopIteration as end:
                return end.value
            finally:
                self.longest = max(self.longest, perf_counter() - start)
            yield pending
