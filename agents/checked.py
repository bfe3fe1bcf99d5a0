"""Looks at what an environment gives back, so that a slip of its author is named, and not met somewhere behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.rollout.errors import EnvironmentFailure
from toolroll.rollout.types import Action, Observation, StepResult

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


def checked_observation(env: str, found: Any) -> Observation:
    """What `reset` of the environment named `env` gave back. Raises `EnvironmentFailure` in words."""
    if not isinstance(found, Observation):
        raise EnvironmentFailure(f"{env}.reset must return an Observation, not {type(found).__name__}")
    _check_messages(f"{env}.reset", found.messages)
    _check_tools(f"{env}.reset", found.tools)
    return found


def checked_step(env: str, found: Any, action: Action) -> StepResult:
    """What `step` gave back for `action`. Raises `EnvironmentFailure` in words."""
    if not isinstance(found, StepResult):
        raise EnvironmentFailure(f"{env}.step must return a StepResult, not {type(found).__name__}")
    _check_messages(f"{env}.step", found.messages)
    if found.tools is not None:
        _check_tools(f"{env}.step", found.tools)
    checked_reward(f"{env}.step", found.reward)
    answered = [message.get("tool_call_id") for message in found.messages if message["role"] == "tool"]
    missing = [call.name for call in action.tool_calls if call.id not in answered]
    if missing and not found.done:
        raise EnvironmentFailure(f"{env}.step gave no tool message with the tool_call_id of the call of {missing[0]}")
    return found


def checked_reward(where: str, reward: Any) -> float | None:
    """A reward: a finite number, or None for none. Raises `EnvironmentFailure` in words."""
    if reward is None:
        return None
    try:
        value = float(reward) if not isinstance(reward, str | bytes) else math.nan
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise EnvironmentFailure(f"{where} gave the reward {reward!r}: it must be a finite number, or None for none")
    return value


def _check_messages(where: str, messages: Any) -> None:
    plain = type(messages) in (list, tuple)  # nearly always: the tests for abstract types cost ten times as much
    if not plain and (isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence)):
        raise EnvironmentFailure(f"{where}: messages must be a list of messages, not {type(messages).__name__}")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise EnvironmentFailure(
                f"{where}: messages[{at}] must be a mapping with a role of {', '.join(_ROLES)}, not {message!r:.100}"
            )
        if not isinstance(message.get("content"), str | list | None):
            kind = type(message["content"]).__name__
            raise EnvironmentFailure(f"{where}: the content of messages[{at}] must be text, not {kind}")


def _check_tools(where: str, tools: Any) -> None:
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise EnvironmentFailure(f"{where}: tools[{at}] must be {_TOOL}, not {tool!r:.100}")
