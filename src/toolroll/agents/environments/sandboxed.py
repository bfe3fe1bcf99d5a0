"""`SandboxEnvironment`: the base of environments that a program can play."""

from __future__ import annotations

from toolroll.agents.programs.sandbox import Sandbox
from toolroll.rollout.types import Environment


class SandboxEnvironment(Environment):
    """An environment whose `reset` sets `sandbox` and starts it, and whose `step` grades it.

    A program starts in `folder` of the sandbox, and may take `timeout` seconds (None: 3600). Its
    end is the only action.
    """

    can_wait = False  # a sandbox keeps running
    sandbox: Sandbox
    folder = "/app"
    timeout: float | None = None

    async def close(self) -> None:
        """End the sandbox."""
        if "sandbox" in vars(self):
            await self.sandbox.close()
