"""Convert environments with different interfaces to an `Environment`. `as_environment` chooses the
adapter.

- Gymnasium's interface is `reset(seed=, options=) -> (obs, info)` and `step(action) -> (obs,
  reward, terminated, truncated, info)`. The episode's reward is the sum of the step rewards, like
  Gymnasium's return.
- tau-bench's interface is `reset(task_index)` and `step(action)`. The text of a `respond` action is
  never blank. `call_to_action_sglang` converts a reply to tau-bench's action type as slime's
  tau-bench example does.

Both take one action per step. Invariants: calls are executed in order until the episode is done,
and later calls are refused. All actions are created before the first one is executed. So if one of
them cannot be created (`ActionError`), nothing has changed. If a call raises `ActionError` after an
earlier call was executed, the error becomes the result of that one call, so that the results and
rewards of the other calls are not lost.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolroll.agents.loop.call_policy import tool_message
from toolroll.agents.loop.environment_runner import DRAWN
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import (
    Action,
    Environment,
    Observation,
    ParallelCalls,
    StepResult,
    Task,
)
from toolroll.rollout.errors import ActionError, UsageError
from toolroll.rollout.runtime.jsonable import plain, shown
from toolroll.rollout.types import Message, Tool

logger = logging.getLogger(__name__)

NOT_EXECUTED = "Not executed: the conversation had ended with an earlier call of the same turn."


def as_environment(env: Any, *, wiki: str = "", tools_info: Sequence[Tool] = ()) -> Environment:
    """Return `env` if it is an `Environment`. If it has Gymnasium's or tau-bench's interface,
    return an adapter.

    Gymnasium's interface is `reset(seed=, options=)`, and `step(action)` with five values.
    tau-bench's is `reset(task_index)` and `step(action)`. The adapter uses `wiki` (the system
    message) and `tools_info` if `env` has none of its own. Raise `UsageError` for an object with
    another interface.
    """
    if isinstance(env, Environment):
        return env
    if is_gym_style(env):
        return GymStyleEnvironment(env, wiki=wiki, tools_info=tools_info)
    if is_tau_style(env):
        return TauStyleEnvironment(env, wiki=wiki, tools_info=tools_info)
    raise UsageError(
        f"{type(env).__name__} is not an environment: derive it from toolroll.Environment, "
        "or give it tau-bench's reset(task_index) and step(action), or Gymnasium's "
        "reset(seed=, options=) and step(action)"
    )


class OneActionEnvironment(Environment):
    """Adapts `env` to `Environment`. `wiki` (the system message) and `tools_info` are used if `env`
    has none of its own.
    """

    def __init__(self, env: Any, wiki: str, tools_info: Sequence[Tool]) -> None:
        self.env = env
        self._wiki = getattr(env, "wiki", None) or wiki
        self._tools = list(getattr(env, "tools_info", None) or tools_info)

    @abstractmethod
    def make_one(self, content: str, call: ToolCall | None) -> Any:
        """Return the environment's action for `call`, or for the text if there is no call."""

    @abstractmethod
    def execute(self, action: Any) -> tuple[Any, float, bool, Mapping[str, Any]]:
        """Step the environment. Return the observation, the reward, `done` and `info`."""

    def first(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        """Return the wiki as the system message, and `observation` as the user message."""
        messages: list[Message] = [{"role": "system", "content": self._wiki}] if self._wiki else []
        messages.append({"role": "user", "content": observation})
        return Observation(messages, self._tools, info)

    def step(self, action: Action) -> StepResult:
        """Execute each call in order, or the text if there are no calls."""
        if not action.tool_calls:
            if not action.content.strip():
                raise ActionError("Your reply was empty. Write something, or call a tool.")
            text, reward, done, info = self.execute(self.make_one(action.content, None))
            return StepResult([{"role": "user", "content": text}], reward, done, info=info)
        actions = [self.make_one(action.content, call) for call in action.tool_calls]
        messages: list[Message] = []
        total, done = 0.0, False
        infos: dict[str, Any] = {}
        for call, prepared in zip(action.tool_calls, actions, strict=True):
            if done:
                messages.append(tool_message(call, NOT_EXECUTED))
                continue
            try:
                observation, reward, done, info = self.execute(prepared)
            except ActionError as error:
                if not messages:
                    raise
                messages.append(tool_message(call, str(error)))
                continue
            total = total + reward if self.reward_mode == "sum" else reward
            infos |= info
            messages.append(tool_message(call, str(observation)))
        return StepResult(messages, total, done, info=infos)


# --- Gymnasium ------------------------------------------------------------------------------------


MakeGymAction = Callable[[str, ToolCall | None], Any]


def is_gym_style(env: Any) -> bool:
    """Return True if the `reset` of `env` takes `seed` and `options`, as in Gymnasium."""
    reset, step = getattr(env, "reset", None), getattr(env, "step", None)
    if not callable(reset) or not callable(step):
        return False
    try:
        names = set(inspect.signature(reset).parameters)
    except (TypeError, ValueError):
        return False
    return {"seed", "options"} <= names


def text_action(content: str, call: ToolCall | None) -> str:
    """Return the action for an environment that takes text. This is `content`, or the call as JSON:
    `{"name": ..., "arguments": ...}`.
    """
    if call is None:
        return content
    return json.dumps({"name": call.name, "arguments": call.arguments or {}}, ensure_ascii=False)


class GymStyleEnvironment(OneActionEnvironment):
    """Adapts `env`, an environment with Gymnasium's interface, to `Environment`.

    `make_action(content, call)` returns an action of `env`. It is called once per call, or once
    with None if the reply has no call. If it raises `ActionError`, the message becomes the
    observation. `env.reset` gets `options={"task_index": ..., "task_id": ...}`, or None if no task
    was chosen.

        env = GymStyleEnvironment(gymnasium.make("my/TextGame-v0"), wiki="Escape from the maze.")
        result = await agent.asolve(env, task_index=0)
    """

    reward_mode = "sum"

    def __init__(
        self,
        env: Any,
        *,
        wiki: str = "",
        tools_info: Sequence[Tool] = (),
        make_action: MakeGymAction = text_action,
    ) -> None:
        super().__init__(env, wiki, tools_info)
        self._make_action = make_action

    def reset(self, task: Task, seed: int) -> Observation:
        """Reset `env` with the seed and the task."""
        options = None if task is DRAWN else {"task_index": task.index, "task_id": task.id}
        observation, info = self.env.reset(seed=seed, options=options)
        return self.first(as_text(observation), dict(info))

    def make_one(self, content: str, call: ToolCall | None) -> Any:
        return self._make_action(content, call)

    def execute(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Step `env` with `action`, which `make_action` returned."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return as_text(observation), float(reward), bool(terminated or truncated), dict(info)

    def close(self) -> Any:
        """Close `env`. If its `close` is async, return the awaitable."""
        close = getattr(self.env, "close", None)
        return close() if callable(close) else None


def as_text(observation: Any) -> str:
    """Return an observation as a message's content: text unchanged, anything else as JSON."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping | list | tuple | int | float | bool) or observation is None:
        return json.dumps(observation, ensure_ascii=False, default=str)
    return str(observation)


# --- tau-bench ------------------------------------------------------------------------------------


RESPOND_ACTION_NAME = "respond"
RESPOND_ACTION_FIELD_NAME = "content"


@dataclass(slots=True)
class TauAction:
    """One tool call, or one message to the user (`respond`), in tau-bench's interface."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


def call_to_action_sglang(calls: Sequence[Any], text_response: str) -> Any:
    """Return the first call as an action. If there is no call, or if its arguments are not an
    object, return `respond` with the text.

    Each item of `calls` is a `ToolCall`, or `{name, parameters}` with JSON text as `parameters`, as
    SGLang's parsers return it. The action is tau-bench's own `Action` if tau-bench is imported,
    otherwise a `TauAction`. This function never raises an error.
    """
    kind = _action_type()
    respond = kind(name=RESPOND_ACTION_NAME, kwargs={RESPOND_ACTION_FIELD_NAME: text_response})
    if not calls:
        return respond
    if len(calls) > 1:
        logger.debug("%d calls in one reply: only the first becomes an action", len(calls))
    name, arguments = _read(calls[0])
    if not isinstance(arguments, dict):
        logger.warning(
            "the arguments of %s are not a JSON object: the reply is sent to the user as text", name
        )
        return respond
    return kind(name=name, kwargs=arguments)


def _action_type() -> Any:
    # Do not import tau_bench here: it imports litellm, which downloads its price list.
    return getattr(sys.modules.get("tau_bench.types"), "Action", TauAction)


def _read(call: Any) -> tuple[str, Any]:
    if isinstance(call, ToolCall):
        return call.name, call.arguments
    entry: Mapping[str, Any] = call if isinstance(call, Mapping) else vars(call)
    parameters = entry.get("parameters")
    if isinstance(parameters, str):
        try:
            parameters = json.loads(parameters)
        except json.JSONDecodeError:
            parameters = None
    return str(entry.get("name") or ""), parameters


MakeAction = Callable[[str, dict[str, Any]], Any]


def is_tau_style(env: Any) -> bool:
    """Return True if `env` has methods `reset` and `step`. A Gymnasium environment has them too, so
    call `is_gym_style` first.
    """
    return callable(getattr(env, "reset", None)) and callable(getattr(env, "step", None))


class TauStyleEnvironment(OneActionEnvironment):
    """Adapts `env`, an environment with tau-bench's interface, to `Environment`. `make_action(name,
    kwargs)` returns an action of the type that `env` takes.

        env = TauStyleEnvironment(MockRetailDomainEnv(user_strategy="human"), make_action=Action)
        result = await agent.asolve(env, task_index=0)
    """

    parallel_calls: ParallelCalls = "first"

    def __init__(
        self,
        env: Any,
        *,
        wiki: str = "",
        tools_info: Sequence[Tool] = (),
        make_action: MakeAction = TauAction,
    ) -> None:
        super().__init__(env, wiki, tools_info)
        self._make_action = make_action

    def reset(self, task: Task, seed: int) -> Observation:
        response = self.env.reset() if task is DRAWN else self.env.reset(task_index=task.index)
        named = {"task_index": getattr(self.env, "task_index", None)} if task is DRAWN else {}
        return self.first(response.observation, named | info_of(response))

    def make_one(self, content: str, call: ToolCall | None) -> Any:
        """Return the action for `call`, or `respond` with the text."""
        if call is None:
            return self._make_action(RESPOND_ACTION_NAME, {RESPOND_ACTION_FIELD_NAME: content})
        check_no_respond(call)
        return self._make_action(call.name, dict(call.arguments or {}))

    def execute(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Step `env` with `action`, which `make_action` returned."""
        step = self.env.step(action)
        return step.observation, float(step.reward), bool(step.done), info_of(step)


def check_no_respond(call: ToolCall) -> None:
    """Raise `ActionError` if `call` names `respond`, which is an action and not a tool."""
    if call.name == RESPOND_ACTION_NAME:
        raise ActionError(
            f"{RESPOND_ACTION_NAME} is not a tool: write to the user without a tool call"
        )


def info_of(response: Any) -> dict[str, Any]:
    """Return the `info` of a response: a mapping, or an object whose `model_dump()` returns one, as
    in slime's example. It is empty if there is none. Raise `TypeError` for anything else.
    """
    info = data = getattr(response, "info", None)
    if callable(dump := getattr(info, "model_dump", None)) and not isinstance(info, Mapping):
        data = plain(dump())
    if not isinstance(data, Mapping | None):
        raise TypeError(
            f"the info {shown(info)} must be None, a mapping, or an object whose model_dump() "
            "returns a mapping"
        )
    return dict(data or {})
