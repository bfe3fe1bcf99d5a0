"""A simulated user who executes the user's reference actions of a tau2 task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.agents.users import STOP_MARKER, CallTool
from toolroll.environments.tau2.factory import action_groups
from toolroll.rollout.types import Tool


class ReferenceUser:
    """The user of `task`: executes its reference actions when asked, then ends."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._left = [group for side, group in action_groups(task) if side == "user"]
        self._call: CallTool | None = None
        self._lines = 0

    def adopt_tools(self, tools: Sequence[Tool], call: CallTool) -> None:
        """Keep `call`, which executes the actions."""
        self._call = call

    async def reset(self, instruction: str) -> str:
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
