"""Environments for tests, whose behavior is decided by a list."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolroll.rollout.environment import Action, Environment, Observation, StepResult, Task
from toolroll.rollout.types import Message, Tool

_AT = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
_LOOK = {"name": "look", "description": "Look at something.", "parameters": _AT}
TOOL: Any = {"type": "function", "function": _LOOK}


LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
"""The tool without arguments."""


@dataclass
class ListedWorld(Environment):
    """Answers each call with the next of `tool_texts`, each reply without calls with the next of
    `user_texts`; done when either list has run out. `blocking` and `on_step` let a test look at how
    it is called."""

    user_texts: Sequence[Any] = ("Hello.",)
    tool_texts: Sequence[Any] = ()
    system: str = "Be helpful."
    tools: Sequence[Tool] = (TOOL,)
    reward: float = 1.0
    on_step: Callable[[Action], Any] | None = None
    seen: list[Action] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    closed: int = 0
    _users: int = 1
    _tools: int = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self._users, self._tools = 1, 0
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return Observation([*first, {"role": "user", "content": self.user_texts[0]}], self.tools)

    def step(self, action: Action) -> StepResult:
        self.seen.append(action)
        self.threads.add(threading.get_ident())
        if self.on_step is not None:
            found = self.on_step(action)
            if isinstance(found, StepResult):
                return found
        messages: list[Message] = []
        for call in action.tool_calls:
            if self._tools >= len(self.tool_texts):
                return StepResult(messages, self.reward, True)
            answer = {"role": "tool", "tool_call_id": call.id, "name": call.name}
            messages.append({**answer, "content": self.tool_texts[self._tools]})
            self._tools += 1
        if action.tool_calls:
            return StepResult(messages)
        if self._users >= len(self.user_texts):
            return StepResult((), self.reward, True)
        self._users += 1
        return StepResult([{"role": "user", "content": self.user_texts[self._users - 1]}])

    def close(self) -> None:
        self.closed += 1
