"""`Factory`: the base class of the library's environment factories. `openai_tool`: a tool in
OpenAI's format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from toolroll.rollout.environment import EnvironmentOptions, UserSimulator
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Tool


class Factory:
    """Checks the arguments of an `EnvironmentFactory`. A subclass adds `tasks`, `make` and
    `reference`.
    """

    name: str
    description: str
    splits: tuple[str, ...]
    setting: str | None = None
    """The name of the only setting, if there is one."""
    settings_hint = ""
    """The end of the error message for any other setting."""

    def missing(self) -> str | None:
        """Return None, because nothing needs to be installed."""
        return None

    def check_split(self, split: str) -> None:
        """Raise `UsageError` for an unknown split."""
        if split not in self.splits:
            raise UsageError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise `UsageError` if one of `settings` is unknown or not valid."""
        unknown = sorted(settings.keys() - {self.setting})
        if unknown:
            takes = f"only the setting {self.setting}" if self.setting else "no settings"
            names = ", ".join(unknown)
            raise UsageError(f"{self.name} takes {takes}, but got: {names}{self.settings_hint}")

    def needed_user(self, options: EnvironmentOptions) -> Callable[[int], UserSimulator]:
        """Return the function that makes user simulators. Raise `UsageError` if there is none."""
        if options.user is None:
            raise UsageError(
                f"{self.name} needs a user simulator: give --user-model NAME and --user-url "
                "ADDRESS (in Python: EnvironmentOptions(user=OpenAIUsers(UserConfig(...)).make))"
            )
        return options.user


def tool_error_metrics(errors: Counter[str]) -> dict[str, float]:
    """Return the metrics for the number of failed calls: in total, and by tool."""
    by_tool = {f"tool_errors/{name}": float(count) for name, count in errors.items()}
    return {"tool_errors": float(errors.total()), **by_tool}


def openai_tool(name: str, description: str | None, parameters: Mapping[str, Any]) -> Tool:
    """Return a tool in OpenAI's format. `parameters` is a JSON schema."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
