"""A user simulator that sends the lines of a list, for tests, replays and demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolroll.rollout.errors import UserSimulatorError


class ScriptedUser:
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

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
