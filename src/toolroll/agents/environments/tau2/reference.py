"""A task's reference: the agent's actions, and a user who does the user's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from toolroll.agents.users.stop import STOP_MARKER
from toolroll.parsers.types import ToolCall
from toolroll.rollout.types import Action, Tool

_FAREWELL = "That is everything I can do for you. Goodbye."


def _groups(task: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The reference actions in order, those of one side that follow each other together."""
    actions = (task.get("evaluation_criteria") or {}).get("actions") or ()
    return [
        (side, list(group))
        for side, group in groupby(
            actions, key=lambda action: action.get("requestor") or "assistant"
        )
    ]


def reference(task: Mapping[str, Any]) -> list[Action]:
    """The agent's side: its calls, one a step, what it asks the user to do, and what it has to
    tell.
    """
    steps: list[Action] = []
    for side, group in _groups(task):
        if side == "assistant":
            steps += [
                Action("", (ToolCall(action["name"], dict(action["arguments"]), ""),))
                for action in group
            ]
        else:
            asked = "; ".join(
                f"{action['name']} {json.dumps(action['arguments'])}" for action in group
            )
            steps.append(Action(f"Please do this on your phone: {asked}"))
    told = (task.get("evaluation_criteria") or {}).get("communicate_info") or ()
    words = f"You asked for: {'; '.join(map(str, told))}. " if told else ""
    return [*steps, Action(words + _FAREWELL)]


class ReferenceUser:
    """The user of `task` who does the reference's actions when asked, and leaves when there are
    none left.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._left = [group for side, group in _groups(task) if side == "user"]
        self._call: Callable[[str, Mapping[str, Any]], str] | None = None
        self._lines = 0

    def adopt_tools(
        self, tools: Sequence[Tool], call: Callable[[str, Mapping[str, Any]], str]
    ) -> None:
        """Take the phone."""
        self._call = call

    async def reset(self, instruction: str) -> str:
        """A greeting."""
        return "Hello, I need your help."

    async def step(self, content: str) -> str:
        """Do what is next, and say so."""
        self._lines += 1
        if not self._left:
            return STOP_MARKER
        assert self._call is not None
        return (
            "\n".join(
                self._call(action["name"], action["arguments"]) for action in self._left.pop(0)
            )
            or "Done."
        )

    def metrics(self) -> Mapping[str, float]:
        """How many lines were said."""
        return {"user_calls": float(self._lines)}

    async def close(self) -> None:
        """Do nothing: there are no resources to release."""
