"""`HookEnvironment`: the environment that is passed to overridden hooks. It works with and without
`await`.

A hook of slime's tau-bench example returns `env.step(action)`, or reads
`env.reset(...).observation`, without `await`. A hook that is written for toolroll awaits
`env.step(action)`. A plain (not `async`) hook runs in its own thread, so that the environment does
not block the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from toolroll.agents.loop.call_policy import reject_action
from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.loop.hook_value import hook_value, run_hook
from toolroll.rollout.errors import EnvironmentFailure
from toolroll.rollout.types import Action, Message, Observation, StepResult

T = TypeVar("T", Observation, StepResult)


_MISSING = object()


class ObservationText(str):
    """The text of the last user message that `reset` returned. `observation` is the whole
    `Observation`.
    """

    observation: Observation

    @classmethod
    def of(cls, observation: Observation) -> ObservationText:
        """Return the text of the last user message in `observation`, or "" if there is none."""
        texts = [one.get("content") for one in observation.messages if one.get("role") == "user"]
        text = cls(texts[-1] if texts and texts[-1] is not None else "")
        text.observation = observation
        return text


class HookInfo(dict[str, Any]):
    """The `info` of a reset or a step. It can be used as a dict or like tau-bench's pydantic
    model.
    """

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
    """The result of `env.step` in tau-bench's form. A hook may change its fields."""

    observation: str
    reward: float | None
    done: bool
    info: HookInfo
    result: StepResult

    @classmethod
    def of(cls, result: StepResult) -> StepResponse:
        """Return `result` in tau-bench's form."""
        return cls(_text(result), result.reward, result.done, HookInfo(result.info), result)


class HookCall(Generic[T]):
    """A call to the environment that a hook made. The hook can await it, return it, or read its
    result.

    With `await`, the result is an `Observation` or a `StepResult`. Without it, the `HookCall` has
    the attributes of a `ResetResponse` or a `StepResponse`. Reading one of them waits for the
    environment. The environment is called once, even if the hook does both.
    """

    def __init__(
        self,
        env: HookEnvironment,
        start: Callable[[], Coroutine[Any, Any, T]],
        now: Callable[[], T],
        form: Callable[[T], Any],
    ) -> None:
        vars(self).update(_env=env, _start=start, _now=now, _form=form)
        vars(self).update(_found=None, _read=None, _awaited=False)

    def __await__(self) -> Generator[Any, None, T]:
        vars(self)["_awaited"] = True
        if self._found is None:
            vars(self)["_found"] = yield from self._start().__await__()
        found: Any = self._found
        return cast("T", found)

    def response(self) -> Any:
        """Return the response in tau-bench's form. Wait for the environment if needed."""
        if self._found is None:
            vars(self)["_found"] = self._env.wait(self._start, self._now)
        if self._read is None:
            vars(self)["_read"] = self._form(self._found)
        return self._read

    def executed(self) -> bool:
        """Return True if the call was awaited or its result was read."""
        return self._awaited or self._found is not None

    async def result(self) -> Any:
        """If the hook has read the response, return the response, because the hook may have changed
        it. Otherwise return the environment's result.
        """
        return await self if self._read is None else self._read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.response(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.response(), name, value)


class HookEnvironment:
    """The environment of one episode, for overridden hooks. Attributes that are not defined here
    are looked up in the `EnvironmentRunner`, and then in the environment. An attribute that a hook
    sets is set on the environment, and the hook can read it here.
    """

    def __init__(self, runner: EnvironmentRunner) -> None:
        waiting: set[Future[Any]] = set()
        calls: list[tuple[str, HookCall[Any]]] = []
        loop = asyncio.get_running_loop()
        vars(self).update(_runner=runner, _loop=loop, _waiting=waiting, _calls=calls)

    def reset(self, task_index: int | None = None) -> HookCall[Observation]:
        """Start the episode's task. `task_index` has no effect."""
        runner = self._runner
        return self._begun(
            "reset",
            HookCall(
                self,
                runner.reset,
                runner.reset_now,
                lambda found: ResetResponse(ObservationText.of(found), HookInfo(found.info)),
            ),
        )

    def step(self, action: Action) -> HookCall[StepResult]:
        """Execute `action`."""
        runner = self._runner
        return self._begun(
            "step",
            HookCall(
                self,
                lambda: runner.step(action),
                lambda: runner.step_now(action),
                StepResponse.of,
            ),
        )

    def _begun(self, method: str, call: HookCall[T]) -> HookCall[T]:
        """Record `call`. In a plain hook, also execute it at once: if such a hook ignores the
        result, nothing else would execute the call.
        """
        self._calls.append((method, call))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            call.response()
        return call

    def wait(self, start: Callable[[], Coroutine[Any, Any, T]], now: Callable[[], T]) -> T:
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
                stacklevel=4,
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
            found = getattr(owner, name, _MISSING)
            if found is not _MISSING:
                return found
        raise AttributeError(f"neither the environment nor its runner has {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        env = self._runner.env
        wrapped = getattr(env, "env", None)  # tau-bench's or Gymnasium's own environment
        wraps = callable(getattr(wrapped, "step", None))
        known = getattr(env, name, _MISSING) is not _MISSING
        setattr(wrapped if wraps and not known else env, name, value)
        vars(self)[name] = value


async def call_hook(name: str, hook: Callable[..., Any], env: HookEnvironment, *args: Any) -> Any:
    """Call the overridden `hook` with `env` and `args`, and return its result, awaited if needed. A
    plain hook runs in a thread. `name` is the hook's name in error messages.

    Raise `EnvironmentFailure` if the hook lacks an `await`.
    """
    try:
        found = await run_hook(hook, env, *args)
        if isinstance(found, HookCall):
            found = await found.result()
        elif inspect.isawaitable(found):
            found = await found
        hook_value(name, found, depth=3)
        env.check_executed(name)
        return found
    finally:
        env.cancel()


def execute_with(
    hook: Callable[..., Any],
) -> Callable[[EnvironmentRunner, Action], Awaitable[StepResult]]:
    """Return a function that calls `hook`, an overridden `_execute_tool`. The loop calls this
    function in place of `EnvironmentRunner.step`.
    """

    async def execute(runner: EnvironmentRunner, action: Action) -> StepResult:
        own = HookAction(action.content, action.tool_calls)
        env = HookEnvironment(runner)
        found = await call_hook("_execute_tool", hook, env, own)
        return runner.checked_step("_execute_tool", _step_result(found, action), action)

    return execute


def _step_result(found: Any, action: Action) -> StepResult:
    """Convert `found`, which `_execute_tool` returned, to a `StepResult`. `found` has toolroll's
    form or tau-bench's. Its values are not checked here.
    """
    if isinstance(found, StepResult):
        return found
    try:
        if isinstance(found, StepResponse):
            return _of_response(found, action)
        info: Any = getattr(found, "info", None)
        dump = getattr(info, "model_dump", None)
        return StepResult(
            reject_action(action, str(found.observation)),
            found.reward,
            found.done,
            info=dict(info or {}) if dump is None else dump(),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise EnvironmentFailure(
            f"_execute_tool returned {type(found).__name__}: return the result of env.step(action),"
            f" a StepResult, or an object with observation, reward, done and info ({error})"
        ) from error


def _of_response(found: StepResponse, action: Action) -> StepResult:
    messages = found.result.messages
    if found.observation != _text(found.result):
        messages = reject_action(action, str(found.observation))
    return replace(
        found.result,
        messages=messages,
        reward=found.reward,
        done=found.done,
        info=dict(found.info or {}),
    )


def _text(result: StepResult) -> str:
    messages: list[Message] = list(result.messages)
    return "\n".join(str(one.get("content") or "") for one in messages)
