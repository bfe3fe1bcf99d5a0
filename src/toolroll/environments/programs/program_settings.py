"""`ProgramSettings`: what the agent `program` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from toolroll.rollout.settings import Settings, Verify


class ProgramSettings(Settings):
    """What runs in each trial: a `command`, or Harbor's agent `harbor_agent`."""

    command: str | None = None
    variables: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the program."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that the program may take; by default the task's limit, or else 3600."""
    sessions: Path | None = None
    """The folder in which each answer is kept before the program gets it."""
    host: str = "127.0.0.1"
    """The address that the endpoint listens on."""
    server_tools: Literal["refuse", "drop"] = "drop"  # Codex offers one in every request
    verify: Verify = "sample"
    harbor_agent: str | None = None
    harbor_python: str = "python3"
    """The Python interpreter in which Harbor is installed."""
    harbor_environment: str = "local"
    """Harbor's back end; local: this library's."""
    harbor_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for Harbor's agent."""

    @model_validator(mode="after")
    def _one(self) -> ProgramSettings:
        if (self.command is None) == (self.harbor_agent is None):
            raise ValueError("the agent `program` needs either a command or a harbor_agent")
        return self
