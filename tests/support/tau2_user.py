"""Episodes of tau2 with a scripted user."""

from collections.abc import Mapping, Sequence
from typing import Any

from support import tau

from toolroll.agents.users import STOP_MARKER, CallTool
from toolroll.environments.tau2 import Tau2Factory
from toolroll.environments.tau2.factory import action_groups
from toolroll.rollout.environment import Action, EnvironmentOptions, StepResult, Task
from toolroll.rollout.types import Tool

Calls = list[tuple[str, Mapping[str, Any]]]
Script = list[tuple[str, Calls]]
"""For each turn of one side: its text and its calls."""


def reference_user(task: Mapping[str, Any]) -> Script:
    """The user of `task`, who executes its reference actions when asked."""
    groups = [group for side, group in action_groups(task) if side == "user"]
    calls = [[(action["name"], action["arguments"]) for action in group] for group in groups]
    return [("Hello, I need your help.", []), *(("Done.", own) for own in calls)]


class Scripted:
    """A user with a script. When the script is over, the user stops."""

    def __init__(self, script: Script) -> None:
        self._turns = iter([*script, (STOP_MARKER, [])])
        self._call: CallTool | None = None

    def adopt_tools(self, tools: Sequence[Tool], call: CallTool) -> None:
        self._call = call

    async def reset(self, instruction: str) -> str:
        return await self.step("")

    async def step(self, content: str) -> str:
        line, calls = next(self._turns)
        for name, arguments in calls:
            assert self._call is not None
            self._call(name, arguments)
        return line

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        """There is nothing to close."""


async def play(
    factory: Tau2Factory, task: Task, actions: Sequence[Action], user: Any = None
) -> StepResult:
    """The last step of an episode."""
    user = user or Scripted(reference_user(task.data))
    return await tau.play(factory.make(EnvironmentOptions(user=lambda seed: user)), task, actions)
