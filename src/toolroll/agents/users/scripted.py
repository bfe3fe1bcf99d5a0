"""A user simulator that sends the lines of a list, for tests, replays and demonstrations, and what
all users need: the visible text of a model's reply, and the end of the episode.

Invariant: only visible text counts. A stop marker in a simulator's reasoning does not end the
episode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.rollout.environment import UserSimulator
from toolroll.rollout.errors import UserSimulatorError

STOP_MARKER = "###STOP###"
"""The marker that a simulated user writes to end the conversation, as in tau-bench."""

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def is_stop(text: str, marker: str = STOP_MARKER) -> bool:
    """Return True if the line `text` ends the conversation."""
    return marker in text


def visible_text(text: str) -> str:
    """Return `text` without reasoning. Three forms of reasoning are removed: closed `<think>`
    blocks, an unclosed block up to the end of the text, and the text before a lone `</think>`
    (whose opening tag the chat template wrote).
    """
    text = _THOUGHT.sub("", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0].strip()


def checked_line(line: Any) -> str:
    """Return a simulated user's line. Raise `UserSimulatorError` if it is blank or not text."""
    if not isinstance(line, str) or not line.strip():
        raise UserSimulatorError(f"the user simulator returned a blank line or no text: {line!r}")
    return line


class ScriptedUser(UserSimulator):
    """Sends `lines` in order, the first one at `reset`. Then it sends `default` forever.

    Without a `default`, a step after the last line raises `UserSimulatorError`, because the
    conversation no longer matches the lines.

        user = ScriptedUser(["Renew my loan, please.", "Thanks. ###STOP###"])
        options = EnvironmentOptions(user=lambda seed: user)
    """

    def __init__(self, lines: Sequence[str], default: str | None = None) -> None:
        self._lines = tuple(lines)
        self._default = default
        self._next = 0
        self._calls = 0

    async def reset(self, instruction: str) -> str:
        """Return the first line. `instruction` has no effect."""
        self._next = self._calls = 0
        return self._line()

    async def step(self, content: str) -> str:
        """Return the next line. `content` has no effect."""
        return self._line()

    def _line(self) -> str:
        self._calls += 1
        if self._next < len(self._lines):
            self._next += 1
            return self._lines[self._next - 1]
        if self._default is None:
            raise UserSimulatorError(
                f"the scripted user has only {len(self._lines)} lines, and one more is needed: "
                "give more lines, or a default"
            )
        return self._default

    def metrics(self) -> Mapping[str, float]:
        """Return the number of lines that were requested, as `user_calls`."""
        return {"user_calls": float(self._calls)}
