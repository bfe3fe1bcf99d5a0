"""`HookEnvironment`: the environment that is passed to overridden hooks. It works with and without
`await`.

A hook of slime's tau-bench example returns `env.step(action)`, or reads
`env.reset(...).observation`, without `await`. A hook that is written for toolroll awaits
`env.step(action)`. A plain (not `async`) hook runs in its own thread, so that the environment does
not block the event loop.

The base hooks return a `HookCall` too (`reset_hook`, `step_hook`). So an override may use `super()`
with and without `await`, and a hook may be called directly, outside an episode.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

from toolroll.agents.loop.adapt import info_of
from toolroll.agents.loop.call_policy import reject_action
from toolroll.agents.loop.environment_runner import DRAWN, EnvironmentRunner, chosen_task
from toolroll.agents.loop.hook_value import hook_value, run_hook
from toolroll.rollout.environment import Action, Environment, Observation, StepResult
from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.types import Message

T = TypeVar("T")

_MISSING = object()


class ObservationText(str):
    """The text of the last user message that `reset` returned. `observation` is the whole
    `Observation`.
    """

    observation: Observation

    @classmethod
    def of(cls, observation: Observation) -> ObservationText:
        """Return the text of the last user message in `observation`, or "" if there is none."""
        last: Message = {}
        for message in observation.messages:
            if message.get("role") == "user":
                last = message
        content = last.get("content")
        text = cls("" if content is None else content)
        text.observation = observation
        return text


class HookInfo(dict[str, Any]):
    """The `info` of a reset or a step, for use as a dict or as tau-bench's pydantic model."""

    def model_dump(self) -> dict[str, Any]:
        """Return a plain dict."""
        return dict(self)

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the environment's info has no {name!r}")
        return self[name]


class HookAction(Action):
    """An action that also has the fields of tau-bench's actions, `name` and `kwargs`. As in slime's
    tau-bench example, they describe the first call, or `respond` if there is no call.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name of the first call, or "respond"."""
        return self.tool_calls[0].name if self.tool_calls else "respond"

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of the first call, or `{"content": text}`."""
        if self.tool_calls:
            return dict(self.tool_calls[0].arguments or {})
        return {"content": self.content}


@dataclass(slots=True)
class ResetResponse:
    """The result of `env.reset` in tau-bench's form."""

    observation: ObservationText
    info: HookInfo


@dataclass(slots=True)
class StepResponse:
    """The result of `env.step` in tau-bench's form. A hook may change its fields. `reward` is 0.0
    if the step has no reward.
    """

    observation: str
    reward: float
    done: bool
    info: HookInfo
    result: StepResult


class HookCall(Coroutine[Any, Any, Any]):
    """A call to the environment that a hook made. The hook can await it, return it, or read its
    result.

    With `await`, the result is what `start` returns. Without it, the `HookCall` has the attributes
    and items of the response, which is the result in tau-bench's form. Reading one of them calls
    `read`, which waits for the result. The call is executed once, even if the hook does both.
    """

    def __init__(self, start: Callable[[], Awaitable[Any]], read: Callable[[], Any]) -> None:
        # A hook's assignments to a call change the response (`__setattr__`), so the call's own
        # fields are set in its dictionary.
        vars(self).update(_start=start, _read=read, _running=None)
        vars(self).update(_result=_MISSING, _response=_MISSING, _awaited=False)

    @classmethod
    def of(cls, returned: Any, form: Callable[[Any], Any] = lambda response: response) -> HookCall:
        """Return a `HookCall` for what an environment's method has `returned`: another `HookCall`,
        a result or an awaitable. Its result and its response are the response in tau-bench's form,
        changed by `form`.
        """
        call = returned if isinstance(returned, HookCall) else None

        async def start() -> Any:
            result = await returned if inspect.isawaitable(returned) else returned
            return form(_tau_form(result) if call is None else call.response())

        def read() -> Any:
            if call is not None:
                return form(call.response())
            if inspect.isawaitable(returned):
                raise UsageError("the environment is async: write `await` before the hook's call")
            return form(_tau_form(returned))

        return cls(start, read)

    def __await__(self) -> Generator[Any, None, Any]:
        vars(self)["_awaited"] = True
        if self._result is _MISSING:
            vars(self)["_result"] = yield from self._start().__await__()
        return self._result

    # With these methods, `asyncio.run` and `asyncio.create_task` accept the call as a coroutine.

    def send(self, value: Any) -> Any:
        """Run the call up to its next wait."""
        return self._started().send(value)

    def throw(self, *error: Any) -> Any:
        """Raise `error` where the call waits."""
        return self._started().throw(*error)

    def close(self) -> None:
        """End the call."""
        self._started().close()

    def _started(self) -> Generator[Any, None, Any]:
        running: Generator[Any, None, Any] = self._running or self.__await__()
        vars(self)["_running"] = running
        return running

    def response(self) -> Any:
        """Return the response. Wait for the environment if needed."""
        if self._result is _MISSING:
            vars(self)["_result"] = self._read()
        if self._response is _MISSING:
            vars(self)["_response"] = _tau_form(self._result)
        return self._response

    def executed(self) -> bool:
        """Return True if the call was awaited or its result was read."""
        return self._awaited or self._result is not _MISSING

    async def result(self) -> Any:
        """If the hook has read the response, return the response, because the hook may have changed
        it. Otherwise return the environment's result.
        """
        return await self if self._response is _MISSING else self._response

    def __iter__(self) -> Iterator[Any]:
        return iter(self.response())

    def __getitem__(self, key: Any) -> Any:
        return self.response()[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.response(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.response(), name, value)


def reset_hook(env: Any, task_index: int | None) -> HookCall:
    """Reset `env`, and return the call. Its result is the observation's text and the info. `env` is
    a `HookEnvironment`, or an environment outside an episode.
    """
    if isinstance(env, Environment):
        returned: Any = env.reset(chosen_task(task_index), 0)
    else:  # as in slime's example
        returned = env.reset() if task_index is None else env.reset(task_index=task_index)
    return HookCall.of(returned, lambda first: (first.observation, info_of(first)))


def step_hook(env: Any, action: Any) -> HookCall:
    """Step `env` with `action`, and return the call. Its result has `observation`, `reward`, `done`
    and `info`. `env` is as in `reset_hook`.
    """
    return HookCall.of(env.step(action))


def _tau_form(result: Any) -> Any:
    """Return the result of a reset or a step in tau-bench's form."""
    if isinstance(result, Observation):
        return ResetResponse(ObservationText.of(result), HookInfo(result.info))
    if isinstance(result, StepResult):
        reward = 0.0 if result.reward is None else result.reward
        return StepResponse(_text(result), reward, result.done, HookInfo(result.info), result)
    return result


class HookEnvironment:
    """The environment of one episode, for overridden hooks. Attributes that are not defined here
    are looked up in the `EnvironmentRunner`, and then in the environment. An attribute that a hook
    sets is set on the environment, and the hook can read it here.
    """

    def __init__(self, runner: EnvironmentRunner) -> None:
        waiting: set[Future[Any]] = set()
        calls: list[tuple[str, HookCall]] = []
        loop = asyncio.get_running_loop()
        vars(self).update(_runner=runner, _loop=loop, _waiting=waiting, _calls=calls)

    def reset(self, task_index: int | None = None) -> HookCall:
        """Start the episode's task. `task_index` has an effect only if `asolve` got no task."""
        if self._runner.task is DRAWN:
            self._runner.task = chosen_task(task_index)
        return self._begun("reset", self._runner.reset, self._runner.reset_now)

    def step(self, action: Action) -> HookCall:
        """Execute `action`."""
        runner = self._runner
        return self._begun("step", lambda: runner.step(action), lambda: runner.step_now(action))

    def _begun(
        self, method: str, start: Callable[[], Coroutine[Any, Any, T]], now: Callable[[], T]
    ) -> HookCall:
        """Return and record the call of `method`. In a plain hook, also execute it at once: if such
        a hook ignores the result, nothing else would execute the call.
        """
        call = HookCall(start, lambda: self._wait(start, now))
        self._calls.append((method, call))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            call.response()
        return call

    def _wait(self, start: Callable[[], Coroutine[Any, Any, T]], now: Callable[[], T]) -> T:
        """Return the result of a call that a hook reads without `await`."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # in the thread of a plain hook
            future = asyncio.run_coroutine_threadsafe(start(), self._loop)
            self._waiting.add(future)
            try:
                return future.result()
            finally:
                self._waiting.discard(future)
        if self._runner.env.blocking:
            warnings.warn(
                "an async hook reads the environment's result without `await`, which blocks all "
                "other episodes: write `await env.step(action)`, or make the hook a plain function",
                RuntimeWarning,
                stacklevel=_hook_level(),
            )
        return now()

    def check_executed(self, hook: str) -> None:
        """Raise `EnvironmentFailure` if a call by an async `hook` was not executed."""
        for method, call in self._calls:
            if not call.executed():
                raise EnvironmentFailure(
                    f"{hook} neither awaited env.{method}(...) nor used its result, so the call "
                    f"never ran: write `await env.{method}(...)`"
                )

    def cancel(self) -> None:
        """Cancel the calls that a cancelled hook still waits for."""
        for future in tuple(self._waiting):
            future.cancel()

    def __getattr__(self, name: str) -> Any:
        for owner in (self._runner, self._runner.env, getattr(self._runner.env, "env", None)):
            value = getattr(owner, name, _MISSING)
            if value is not _MISSING:
                return value
        raise AttributeError(f"neither the environment nor its runner has {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        env = self._runner.env
        wrapped = getattr(env, "env", None)  # tau-bench's or Gymnasium's own environment
        wraps = callable(getattr(wrapped, "step", None))
        defined = getattr(env, name, _MISSING) is not _MISSING
        setattr(wrapped if wraps and not defined else env, name, value)
        vars(self)[name] = value


async def call_hook(name: str, hook: Callable[..., Any], env: HookEnvironment, *args: Any) -> Any:
    """Call the overridden `hook` with `env` and `args`, and return its result, awaited if needed. A
    plain hook runs in a thread. `name` is the hook's name in error messages.

    Raise `EnvironmentFailure` if the hook lacks an `await`.
    """
    try:
        returned = await run_hook(hook, env, *args)
        if isinstance(returned, HookCall):
            returned = await returned.result()
        elif inspect.isawaitable(returned):
            returned = await returned
        hook_value(name, returned, depth=3)
        env.check_executed(name)
        return returned
    finally:
        env.cancel()


def execute_with(
    hook: Callable[..., Any],
) -> Callable[[EnvironmentRunner, Action], Awaitable[StepResult]]:
    """Return a function that calls `hook`, an overridden `_execute_tool`. The loop calls this
    function in place of `EnvironmentRunner.step`.
    """

    async def execute(runner: EnvironmentRunner, action: Action) -> StepResult:
        hook_action = HookAction(action.content, action.tool_calls)
        env = HookEnvironment(runner)
        returned = await call_hook("_execute_tool", hook, env, hook_action)
        return runner.checked_step("_execute_tool", _step_result(returned, action), action)

    return execute


def _step_result(returned: Any, action: Action) -> StepResult:
    """Convert what `_execute_tool` returned, in toolroll's form or tau-bench's, to a `StepResult`.
    Its values are not checked here.
    """
    if isinstance(returned, StepResult):
        return returned
    try:
        if isinstance(returned, StepResponse):
            return _of_response(returned, action)
        return StepResult(
            reject_action(action, str(returned.observation)),
            returned.reward,
            returned.done,
            info=info_of(returned),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise EnvironmentFailure(
            f"_execute_tool returned {type(returned).__name__}: return the result of "
            "env.step(action), a StepResult, or an object with observation, reward, done and info "
            f"({error})"
        ) from error


def _of_response(response: StepResponse, action: Action) -> StepResult:
    messages, reward = response.result.messages, response.result.reward
    if response.observation != _text(response.result):
        messages = reject_action(action, str(response.observation))
    if reward is not None or response.reward != 0.0:
        reward = response.reward
    return replace(
        response.result,
        messages=messages,
        reward=reward,
        done=response.done,
        info=dict(response.info or {}),
    )


def _text(result: StepResult) -> str:
    messages: list[Message] = list(result.messages)
    return "\n".join(str(message.get("content") or "") for message in messages)


def _hook_level() -> int:
    """Return the `stacklevel` with which the caller's warning names the hook's line."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("toolroll."):
        frame, level = frame.f_back, level + 1
    return level
