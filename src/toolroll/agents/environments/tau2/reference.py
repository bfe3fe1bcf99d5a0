"""The agent's reference actions for a task, and a scripted user for the user's actions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from toolroll.agents.users import STOP_MARKER, CallTool
from toolroll.parsers.types import ToolCall
from toolroll.rollout.types import Action, Tool

_FAREWELL = "That is everything I can do for you. Goodbye."


def _groups(task: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the reference actions in order, grouped by side. Consecutive actions of one side are
    one group.
    """
    actions = (task.get("evaluation_criteria") or {}).get("actions") or ()
    return [
        (side, list(group))
        for side, group in groupby(
            actions, key=lambda action: action.get("requestor") or "assistant"
        )
    ]


def reference(task: Mapping[str, Any]) -> list[Action]:
    """Return the agent's actions: its calls (one per step), its requests to the user, and a last
    line with the texts that the task requires.
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
    texts = (task.get("evaluation_criteria") or {}).get("communicate_info") or ()
    words = f"You asked for: {'; '.join(map(str, texts))}. " if texts else ""
    return [*steps, Action(words + _FAREWELL)]


class ReferenceUser:
    """The user of `task`. It executes the user's reference actions when the agent asks, and then
    ends the conversation.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._left = [group for side, group in _groups(task) if side == "user"]
        self._call: CallTool | None = None
        self._lines = 0

    def adopt_tools(self, tools: Sequence[Tool], call: CallTool) -> None:
        """Keep `call`, which executes the actions."""
        self._call = call

    async def reset(self, instruction: str) -> str:
        """Return a greeting."""
        return "Hello, I need your help."

    async def step(self, content: str) -> str:
        """Execute the user's next group of reference actions, and return their results as the
        user's line. If no group is left, return the stop marker.
        """
        self._lines += 1
        if not self._left:
            return STOP_MARKER
        assert self._call is not None
        actions = self._left.pop(0)
        results = [self._call(action["name"], action["arguments"]) for action in actions]
        return "\n".join(results) or "Done."

    def metrics(self) -> Mapping[str, float]:
        """Return the number of replies to the agent, as `user_calls`."""
        return {"user_calls": float(self._lines)}

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
