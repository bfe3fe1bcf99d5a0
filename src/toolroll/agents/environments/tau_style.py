"""`TauStyleEnvironment`: adapts environments with tau-bench's interface, `reset(task_index)` and
`step(action)`. The text of a `respond` action is never blank. `call_to_action_sglang` converts a
reply to tau-bench's action type as slime's tau-bench example does.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolroll.agents.environments.one_action import OneActionEnvironment
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError
from toolroll.rollout.types import Observation, ParallelCalls, Task, Tool

logger = logging.getLogger(__name__)

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
        response = self.env.reset(task_index=task.index)
        return self.first(response.observation, as_data(response.info))

    def make_one(self, content: str, call: ToolCall | None) -> Any:
        """Return the action for `call`, or `respond` with the text."""
        if call is None:
            return self._make_action(RESPOND_ACTION_NAME, {RESPOND_ACTION_FIELD_NAME: content})
        check_no_respond(call)
        return self._make_action(call.name, dict(call.arguments or {}))

    def execute(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Step `env` with `action`, which `make_action` returned."""
        step = self.env.step(action)
        return step.observation, float(step.reward), bool(step.done), as_data(step.info)


def check_no_respond(call: ToolCall) -> None:
    """Raise `ActionError` if `call` names `respond`, which is an action and not a tool."""
    if call.name == RESPOND_ACTION_NAME:
        raise ActionError(
            f"{RESPOND_ACTION_NAME} is not a tool: write to the user without a tool call"
        )


def as_data(info: Any) -> dict[str, Any]:
    """Return an `info` (a pydantic model, a mapping or None) as plain data."""
    if info is None:
        return {}
    if isinstance(info, Mapping):
        return dict(info)
    data: dict[str, Any] = info.model_dump(mode="json")
    return data
