"""Validate the results of an environment, so that an error names the method at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

import numpy as np
import orjson

from toolroll.rollout.errors import EnvironmentFailure
from toolroll.rollout.runtime.jsonable import as_text, finite, key_text, shown
from toolroll.rollout.types import Action, Observation, StepResult

T = TypeVar("T", Observation, StepResult)

MOST_BYTES = 1_000_000
"""The maximum size of one observation: all messages and tools of one `reset` or `step`."""
_LABELS = frozenset({"role", "type", "name", "tool_call_id", "id"})
"""The keys whose texts do not count toward the size of an observation."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


def checked_observation(env: str, found: Any, most_bytes: int = MOST_BYTES) -> Observation:
    """Return a copy of `found`, which `reset` returned. The environment cannot change the copy.
    Raise `EnvironmentFailure` if `found` is not valid.
    """
    if not isinstance(found, Observation):
        raise EnvironmentFailure(
            f"{env}.reset must return an Observation, not {type(found).__name__}"
        )
    check_messages(f"{env}.reset", found.messages)
    _check_tools(f"{env}.reset", found.tools)
    check_size(f"{env}.reset", found.messages, found.tools, most_bytes)
    _check_info(f"{env}.reset", found.info)
    return _own(found)


def checked_step(
    where: str, found: Any, action: Action, most_bytes: int = MOST_BYTES
) -> StepResult:
    """Return a copy of `found`, which the function `where` returned. The environment cannot change
    the copy. Raise `EnvironmentFailure` if `found` is not valid.
    """
    if not isinstance(found, StepResult):
        raise EnvironmentFailure(f"{where} must return a StepResult, not {type(found).__name__}")
    check_messages(where, found.messages)
    if found.tools is not None:
        _check_tools(where, found.tools)
    check_size(where, found.messages, found.tools or (), most_bytes)
    reward = checked_reward(where, found.reward)
    _check_info(where, found.info)
    if not isinstance(found.done, bool | int | np.bool_):
        raise EnvironmentFailure(f"{where}: done must be True or False, not {shown(found.done)}")
    answered = [
        message.get("tool_call_id") for message in found.messages if message["role"] == "tool"
    ]
    missing = [call.name for call in action.tool_calls if call.id not in answered]
    if missing and not found.done:
        raise EnvironmentFailure(
            f"{where} returned no tool message for the call to {missing[0]}: return one with the "
            "call's id as tool_call_id"
        )
    made = _own(found)
    object.__setattr__(made, "reward", reward)
    return made


def _own(found: T) -> T:
    """Return a copy of `found` whose messages and tools the environment cannot change. The class of
    `found` may be a subclass with another constructor, so the constructor is not called.
    """
    made = copy(found)
    for name in ("messages", "tools"):
        object.__setattr__(made, name, _copied(getattr(found, name)))
    return made


def _copied(value: Any) -> Any:
    """Return `value` with copies of all dicts and lists in it."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def checked_reward(where: str, reward: Any) -> float | None:
    """Return a reward: a finite number or None. Raise `EnvironmentFailure` for anything else."""
    if reward is None:
        return None
    value = finite(reward)
    if value is None:
        raise EnvironmentFailure(
            f"{where} gave the reward {shown(reward)}: it must be a finite number or None"
        )
    return value


def checked_metrics(env: str, found: Any) -> tuple[dict[str, float], str | None]:
    """Return the finite numbers that `metrics` returned. If there are other values, also return an
    error message about them.
    """
    if not isinstance(found, Mapping):
        return {}, f"{env}.metrics must return a mapping of numbers, not {shown(found)}"
    numbers = {key_text(name): finite(value) for name, value in found.items()}
    kept = {name: value for name, value in numbers.items() if value is not None}
    if len(kept) == len(found):
        return kept, None
    wrong = "; ".join(
        f"{key_text(name)}: {shown(value)}"
        for name, value in found.items()
        if key_text(name) not in kept
    )
    return kept, f"{env}.metrics must return finite numbers, not {wrong}"


def _check_info(where: str, info: Any) -> None:
    if not isinstance(info, Mapping):
        raise EnvironmentFailure(f"{where}: info must be a mapping, not {shown(info)}")


def check_size(
    where: str, messages: Sequence[Mapping[str, Any]], tools: Any, most_bytes: int
) -> None:
    """Raise `EnvironmentFailure` if an observation has more than `most_bytes` of text."""
    sizes = [_text_bytes(message) for message in messages]
    size = sum(sizes) + _text_bytes(tools)
    if size > most_bytes:
        raise EnvironmentFailure(
            f"{where} returned {size} bytes of text ({max(sizes, default=0)} in the longest of "
            f"{len(sizes)} messages), more than max_observation_bytes ({most_bytes}) allows: "
            "shorten what the environment returns, or raise --max-observation-bytes"
        )


def _text_bytes(value: Any) -> int:
    """Return the number of bytes of the texts in `value`, without labels such as a role."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    if isinstance(value, Mapping):
        return sum(
            _text_bytes(item)
            for key, item in value.items()
            if key not in _LABELS or not isinstance(item, str)
        )
    return sum(map(_text_bytes, value)) if isinstance(value, list | tuple) else 0


def check_messages(where: str, messages: Any) -> None:
    """Raise `EnvironmentFailure` if `messages`, which the function `where` returned, is not a list
    of messages.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise EnvironmentFailure(
            f"{where}: messages must be a list of messages, not {type(messages).__name__}"
        )
    for at, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise EnvironmentFailure(
                f"{where}: messages[{at}] must be a mapping with a role of {', '.join(_ROLES)}, "
                f"not {shown(message)}"
            )
        if not isinstance(message.get("content"), str | list | None):
            kind = type(message["content"]).__name__
            raise EnvironmentFailure(
                f"{where}: the content of messages[{at}] must be text, not {kind}"
            )
        if _is_nested_too_deep(message):
            raise EnvironmentFailure(
                f"{where}: messages[{at}] is nested too deeply, or contains itself"
            )


def _is_nested_too_deep(message: Mapping[Any, Any]) -> bool:
    if all(type(value) is str for value in message.values()):
        return False
    try:
        orjson.dumps(
            message, default=as_text, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        )
    except TypeError as error:
        return "ecursion" in str(error)
    return False


def _check_tools(where: str, tools: Any) -> None:
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise EnvironmentFailure(f"{where}: tools must be a list of tools, not {shown(tools)}")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise EnvironmentFailure(f"{where}: tools[{at}] must be {_TOOL}, not {shown(tool)}")
