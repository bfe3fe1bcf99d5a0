"""`SandboxEnvironment`: the base of environments that a program can play."""

from __future__ import annotations

from toolroll.environments.programs.program_settings import ProgramSettings
from toolroll.environments.programs.sandbox import Sandbox
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

    def program(self, settings: ProgramSettings) -> tuple[str, float]:
        """Return the program's command and its time limit in seconds."""
        return str(settings.command), settings.timeout or self.timeout or 3600.0

    async def close(self) -> None:
        """End the sandbox."""
        if "sandbox" in vars(self):
            await self.sandbox.close()
