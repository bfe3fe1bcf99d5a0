"""A small benchmark for tests of runs, with any number of tasks. The embedded engine's policy
depends only on the prompt, so that an episode is always the same.
"""

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from support.episodes import call
from support.listed_environment import TOOL
from support.scripted_runs import ScriptedFactory

from toolroll.rollout.environment import Action, Environment, Observation, StepResult, Task
from toolroll.rollout.types import Message
from toolroll.testing import PolicyRequest

_SEEN = ("frog", "fish", "newt", "reed")


class Pond(Environment):
    """The user asks for a number of looks; each look shows something that follows from the seed;
    a reply without a call ends it.
    """

    def __init__(self, on_step: Callable[[Task, Action], Any] | None = None) -> None:
        self._on_step = on_step

    def reset(self, task: Task, seed: int) -> Observation:
        self._task, self._random, self._looks = task, random.Random(seed), 0
        text = f"Please look around {task.data['looks']} times. This is pond {task.id}, day {seed}."
        system = {"role": "system", "content": "Be helpful."}
        return Observation([system, {"role": "user", "content": text}], [TOOL])

    def step(self, action: Action) -> StepResult:
        if self._on_step is not None:
            self._on_step(self._task, action)
        if not action.tool_calls:
            reward = float(self._looks == self._task.data["looks"])
            return StepResult((), reward, True, info={"looks": self._looks})
        self._looks += len(action.tool_calls)
        return StepResult([self._shown(call.id, call.name) for call in action.tool_calls])

    def _shown(self, call_id: str, name: str) -> Message:
        content = f"a {self._random.choice(_SEEN)} at {self._random.random():.6f}"
        return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}

    def metrics(self) -> Mapping[str, float]:
        return {"tool_errors": 0.0}


class PondFactory(ScriptedFactory):
    """`count` tasks. `on_step(task, action)` is called in every step, and may raise."""

    def __init__(
        self,
        count: int = 10,
        on_step: Callable[[Task, Action], Any] | None = None,
        name: str = "pond",
    ) -> None:
        super().__init__(lambda: Pond(on_step), count, name)

    def tasks(self, split: str) -> Sequence[Task]:
        return [replace(task, data={"looks": task.index % 4}) for task in super().tasks(split)]


def look(request: PolicyRequest) -> str:
    """Looks as often as asked, but for one pond in five; depends only on the prompt."""
    text = request.text
    wanted = int(text.split("Please look around ")[1].split(" times")[0])
    done = text.count('"arguments": {"at": "place')
    lazy = zlib.crc32(text.split("This is pond")[1].split(".")[0].encode()) % 5 == 0
    if done >= wanted - lazy:
        return f"I have looked {done} times."
    return call(at=f"place {zlib.crc32(text.encode()) % 1000}")
