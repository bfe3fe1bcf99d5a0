"""Validate the results of an environment, so that an error names the method at fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from toolroll.rollout.environment import Action, Observation, StepResult
from toolroll.rollout.errors import EnvironmentFailure
from toolroll.rollout.runtime.jsonable import finite, key_text, shown
from toolroll.rollout.template.snapshot import ATOMS

T = TypeVar("T", Observation, StepResult)
Item = TypeVar("Item")

MOST_BYTES = 1_000_000
"""The maximum size of one observation: all messages and tools of one `reset` or `step`."""
OWN_INFO = frozenset({"error", "bad_calls", "trainable", "forks", "metrics_error", "close_error"})
"""The keys of an episode's info that toolroll writes. An environment's own value under such a key
is stored under `env/KEY`.
"""
_MOST_VALUES = 100_000
_DEEPEST = 100
_WHOLE = (str, bytes, bytearray)
_CONTAINERS = (dict, list, Mapping, Sequence)  # the first two, because their check is fast
_LABELS = frozenset({"role", "type", "name", "tool_call_id", "id"})
"""The keys whose texts do not count toward the size of an observation."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


def checked_observation(env: str, returned: Any, most_bytes: int = MOST_BYTES) -> Observation:
    """Return a copy of `returned`, which `reset` returned (see `_checked`). Raise
    `EnvironmentFailure` if it is not valid.
    """
    if not isinstance(returned, Observation):
        raise EnvironmentFailure(
            f"{env}.reset must return an Observation, not {type(returned).__name__}"
        )
    return _checked(f"{env}.reset", returned, most_bytes)


def checked_step(
    where: str, returned: Any, action: Action, most_bytes: int = MOST_BYTES
) -> StepResult:
    """Return a copy of `returned`, which the function `where` returned (see `_checked`). Raise
    `EnvironmentFailure` if it is not valid.
    """
    if not isinstance(returned, StepResult):
        raise EnvironmentFailure(f"{where} must return a StepResult, not {type(returned).__name__}")
    step = _checked(where, returned, most_bytes, reward=checked_reward(where, returned.reward))
    if not isinstance(step.done, bool | int | np.bool_):
        raise EnvironmentFailure(f"{where}: done must be True or False, not {shown(step.done)}")
    answered = [
        message.get("tool_call_id") for message in step.messages if message["role"] == "tool"
    ]
    missing = [call.name for call in action.tool_calls if call.id not in answered]
    if missing and not step.done:
        raise EnvironmentFailure(
            f"{where} returned no tool message for the call to {missing[0]}: return one with the "
            "call's id as tool_call_id"
        )
    return step


def _checked(where: str, returned: T, most_bytes: int, **fields: Any) -> T:
    """Return a copy of `returned` with `fields`, and with valid messages, tools and info. The
    environment cannot change the messages and tools of the copy. The values in its info are not
    copied.
    """
    reader = _Reader(where)
    if not isinstance(returned.info, Mapping):
        raise EnvironmentFailure(f"{where}: info must be a mapping, not {shown(returned.info)}")
    messages = reader.copied(returned.messages, "messages")
    tools = reader.copied(returned.tools, "tools")
    info = {_ours_apart(name): value for name, value in reader.read(returned.info.items())}
    check_messages(where, messages)
    if returned.tools is not None or isinstance(returned, Observation):
        _check_tools(where, tools)
    check_size(where, messages, tools or (), most_bytes)
    fields.update(messages=messages, tools=tools, info=info)
    copied = copy(returned)  # the constructor of a subclass may be another one
    for name, value in fields.items():
        object.__setattr__(copied, name, value)
    return copied


def _ours_apart(name: Any) -> Any:
    """Return the key in an episode's info for the environment's `name`."""
    return f"env/{name}" if isinstance(name, str) and name in OWN_INFO else name


class _Reader:
    """Copies what an environment returned. Its sequences and mappings may be of any class, and may
    have no end, so at most `_MOST_VALUES` of their items are read.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._left = _MOST_VALUES

    def copied(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return `value`, called `name` in errors, with all mappings and sequences copied."""
        if type(value) in ATOMS or not isinstance(value, _CONTAINERS) or isinstance(value, _WHOLE):
            return value
        if depth > _DEEPEST:
            raise EnvironmentFailure(
                f"{self._where}: {name} is nested too deeply, or contains itself"
            )
        if isinstance(value, (dict, Mapping)):
            return {
                key: item if type(item) in ATOMS else self.copied(item, name, depth + 1)
                for key, item in self.read(value.items())
            }
        return [
            self.copied(item, name if depth else f"{name}[{position}]", depth + 1)
            for position, item in enumerate(self.read(value))
        ]

    def read(self, items: Iterable[Item]) -> list[Item]:
        """Return the `items`. Raise `EnvironmentFailure` if there are too many."""
        values = list(islice(items, self._left + 1))
        self._left -= len(values)
        if self._left < 0:
            raise EnvironmentFailure(
                f"{self._where} returned more than {_MOST_VALUES} values: is a sequence endless?"
            )
        return values


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


def checked_metrics(env: str, returned: Any) -> tuple[dict[str, float], str | None]:
    """Return the finite numbers that `metrics` returned, under the names that they have in an
    episode. If there are other values, also return an error message about them.

    `tool_errors`, `tool_errors/TOOL` and `user_*` are part of the summary. Other names are the
    environment's own, and get the prefix `env/`.
    """
    if not isinstance(returned, Mapping):
        return {}, f"{env}.metrics must return a mapping of numbers, not {shown(returned)}"
    numbers: dict[str, float] = {}
    wrong = []
    for key, value in _Reader(f"{env}.metrics").read(returned.items()):
        text, number = key_text(key), finite(value)
        if number is None:
            wrong.append(f"{text}: {shown(value)}")
        elif _metric(text) in numbers:
            wrong.append(f"{text}: {shown(value)} (a second value)")
        else:
            numbers[_metric(text)] = number
    problems = "; ".join(wrong)
    return numbers, f"{env}.metrics must return finite numbers, not {problems}" if wrong else None


def _metric(name: str) -> str:
    reported = name == "tool_errors" or name.startswith(("tool_errors/", "user_"))
    return name if reported else f"env/{name}"


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
    if isinstance(value, dict):
        items = value.items()
        value = [item for key, item in items if key not in _LABELS or not isinstance(item, str)]
    return sum(map(_text_bytes, value)) if isinstance(value, list | tuple) else 0


def check_messages(where: str, messages: Any) -> None:
    """Raise `EnvironmentFailure` if `messages`, which the function `where` returned, is not a list
    of messages.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise EnvironmentFailure(
            f"{where}: messages must be a list of messages, not {type(messages).__name__}"
        )
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise EnvironmentFailure(
                f"{where}: messages[{index}] must be a mapping with a role of {', '.join(_ROLES)}, "
                f"not {shown(message)}"
            )
        if not isinstance(message.get("content"), str | list | None):
            kind = type(message["content"]).__name__
            raise EnvironmentFailure(
                f"{where}: the content of messages[{index}] must be text, not {kind}"
            )


def _check_tools(where: str, tools: Any) -> None:
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise EnvironmentFailure(f"{where}: tools must be a list of tools, not {shown(tools)}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise EnvironmentFailure(f"{where}: tools[{index}] must be {_TOOL}, not {shown(tool)}")
