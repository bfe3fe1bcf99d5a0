"""Environments of tau-bench's kind behind our `Environment`: `reset(task_index)`, `step(action)`,
one action a step.

Invariants: calls are executed in order until the episode is done; a call behind the one that ended
it is refused, since tau-bench gives reward 1.0 for nothing after the end; `respond` never carries a
blank text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.agents.environments.tau_actions import (
    RESPOND_ACTION_FIELD_NAME,
    RESPOND_ACTION_NAME,
    TauAction,
)
from toolroll.agents.loop.call_policy import answer
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError
from toolroll.rollout.types import (
    Action,
    Environment,
    Message,
    Observation,
    ParallelCalls,
    StepResult,
    Task,
    Tool,
)

MakeAction = Callable[[str, dict[str, Any]], Any]

NOT_EXECUTED = "Not executed: the conversation had ended with an earlier call of the same turn."


def is_tau_style(env: Any) -> bool:
    """Whether `env` has tau-bench's `reset` and `step`."""
    return callable(getattr(env, "reset", None)) and callable(getattr(env, "step", None))


class TauStyleEnvironment(Environment):
    """`env` as it is. `wiki` and `tools_info` stand in where it has none; `make_action(name,
    kwargs)` builds its action type.
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
        self.env = env
        self._wiki = getattr(env, "wiki", None) or wiki
        self._tools = list(getattr(env, "tools_info", None) or tools_info)
        self._make_action = make_action

    def reset(self, task: Task, seed: int) -> Observation:
        """`env.reset(task_index)`: the wiki as the system message, the observation as the
        user's.
        """
        response = self.env.reset(task_index=task.index)
        messages: list[Message] = [{"role": "system", "content": self._wiki}] if self._wiki else []
        messages.append({"role": "user", "content": response.observation})
        return Observation(messages, self._tools, as_data(response.info))

    def step(self, action: Action) -> StepResult:
        """Each call in order; without calls, the text to the user."""
        if not action.tool_calls:
            return self._respond(action.content)
        messages: list[Message] = []
        reward: float | None = None
        done = False
        info: dict[str, Any] = {}
        for call in action.tool_calls:
            if done:
                messages.append(answer(call, NOT_EXECUTED))
                continue
            observation, reward, done, info = self._execute(call)
            messages.append(answer(call, observation))
        return StepResult(messages, reward, done, info=info)

    def _execute(self, call: ToolCall) -> tuple[str, float, bool, dict[str, Any]]:
        if call.name == RESPOND_ACTION_NAME:
            raise ActionError(
                f"{RESPOND_ACTION_NAME} is no tool: write to the user without a tool call"
            )
        response = self.env.step(self._make_action(call.name, dict(call.arguments or {})))
        return (
            str(response.observation),
            float(response.reward),
            bool(response.done),
            as_data(response.info),
        )

    def _respond(self, content: str) -> StepResult:
        if not content.strip():
            raise ActionError("Your reply was empty. Write to the user, or call a tool.")
        response = self.env.step(
            self._make_action(RESPOND_ACTION_NAME, {RESPOND_ACTION_FIELD_NAME: content})
        )
        return StepResult(
            [{"role": "user", "content": response.observation}],
            float(response.reward),
            bool(response.done),
            info=as_data(response.info),
        )


def as_data(info: Any) -> dict[str, Any]:
    """An `info` (a pydantic model, a mapping, None) as plain data."""
    if info is None:
        return {}
    if isinstance(info, Mapping):
        return dict(info)
    data: dict[str, Any] = info.model_dump(mode="json")
    return data
