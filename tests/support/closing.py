"""An environment that counts what was opened and closed, and an engine that never answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from support.patience import PATIENCE

from toolroll.rollout.environment import Action, Environment, Observation, StepResult, Task
from toolroll.rollout.errors import UsageError
from toolroll.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer, serve_in_thread

NAME = "support.closing:Closing"


class Closing(Environment):
    """Its task `WRONG` waits for `gate`, and then raises a `UsageError`."""

    WRONG = 9
    tasks: ClassVar[list[dict[str, Any]]] = [{}] * 10
    opened: ClassVar[list[Closing]] = []
    closed: ClassVar[list[Closing]] = []
    gate: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def clear(cls) -> None:
        cls.opened.clear()
        cls.closed.clear()
        cls.gate.clear()

    def reset(self, task: Task, seed: int) -> Observation:
        self.opened.append(self)
        if task.index == self.WRONG:
            assert self.gate.wait(PATIENCE)
            raise UsageError("the task is wrong")
        return Observation([{"role": "user", "content": f"Task {task.index}."}])

    def step(self, action: Action) -> StepResult:
        return StepResult(done=True, reward=1.0)

    async def close(self) -> None:
        for _ in range(20):  # as a close that awaits a server
            await asyncio.sleep(0)
        self.closed.append(self)


class Held:
    """Holds the first `count` requests, calls `full` with the last of them, answers the others."""

    def __init__(self, count: int, full: Callable[[], object]) -> None:
        self._left, self._full = count, full

    async def __call__(self, request: PolicyRequest) -> str:
        if self._left:
            self._left -= 1
            if not self._left:
                self._full()
            await asyncio.Event().wait()  # until the client is gone
        return "Bye."


@contextmanager
def holding(count: int, full: Callable[[], object]) -> Iterator[EmbeddedEngine]:
    """Serve an engine with the policy `Held`, in a thread."""
    Closing.clear()
    embedded = EmbeddedEngine(load_embedded_tokenizer(), Held(count, full))
    with serve_in_thread(embedded) as engine:
        yield engine
