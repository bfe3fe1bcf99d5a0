"""The scripted member who writes to the desk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolroll.agents.users.stop import STOP_MARKER


class DeskUser:
    """The scripted member. It sends the request, then one missing detail per turn. Then it agrees
    to at most `PATIENCE` questions, and ends the conversation.
    """

    PATIENCE = 3
    """The number of questions to which the member agrees after the last detail."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._opening = task["opening"]
        self._lines = details(task)
        self._calls = 0
        self._agreed = 0

    async def reset(self, instruction: str) -> str:
        """Return the request. `instruction` has no effect, because it is for models."""
        return str(self._opening)

    async def step(self, content: str) -> str:
        """Return the next detail. After the last detail, agree to a question, at most `PATIENCE`
        times. Otherwise return thanks and the stop marker.
        """
        self._calls += 1
        if self._lines:
            return self._lines.pop(0)
        if content.rstrip().endswith("?") and self._agreed < self.PATIENCE:
            self._agreed += 1
            return "Yes, please."
        return f"Thank you, that is all. {STOP_MARKER}"

    def metrics(self) -> Mapping[str, float]:
        """Return the number of replies that the member received."""
        return {"user_calls": float(self._calls)}

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def details(task: Mapping[str, Any]) -> list[str]:
    """Return what the member writes after the request, in order."""
    return [f"My card is {task['card']}, the postcode {task['postcode']}.", *task.get("more", ())]
