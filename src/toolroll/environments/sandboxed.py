"""`SandboxEnvironment`: the base of environments that a program can play."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolroll.environments.programs.output import Exit
from toolroll.environments.programs.program_settings import ProgramSettings
from toolroll.environments.programs.sandbox import Sandbox
from toolroll.rollout.environment import Environment

if TYPE_CHECKING:
    from toolroll.endpoint.http.app import EndpointServer


@dataclass(frozen=True, slots=True)
class Session:
    """The session that a program uses: its server, and what ends it."""

    server: EndpointServer
    end: Callable[[], Awaitable[None]]


class SandboxEnvironment(Environment):
    """An environment whose `reset` sets `sandbox` and starts it, and whose `step` grades it.

    A program starts in `folder` of the sandbox, and may take `timeout` seconds (None: 3600). Its
    end is the only action. A sandbox should not show the folders `hidden`.
    """

    can_wait = False  # a sandbox keeps running
    sandbox: Sandbox
    folder = "/app"
    timeout: float | None = None
    hidden: Sequence[Path] = ()

    def time_limit(self, settings: ProgramSettings) -> float:
        """Return the time limit of the program, in seconds."""
        return settings.timeout or self.timeout or 3600.0

    async def play(
        self, settings: ProgramSettings, variables: Mapping[str, str], session: Session
    ) -> Exit:
        """Run the program to its end. In the sandbox, the model is at the address that it also has
        outside.
        """
        async with AsyncExitStack() as stack:
            if self.sandbox.network == "none":
                listener = await self.sandbox.listen(session.server.port)
                await stack.enter_async_context(session.server.listening(listener))
            command, limit = str(settings.command), self.time_limit(settings)
            return await self.sandbox.run(command, variables, folder=self.folder, time_limit=limit)

    async def stop(self) -> None:
        """Kill the program."""
        await self.sandbox.kill()

    async def close(self) -> None:
        """End the sandbox."""
        if "sandbox" in vars(self):
            await self.sandbox.close()
