"""The environment of the loops: it answers a call with the next recorded tool result, and a text
with the next line of the user.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.conversations import Workload, as_sampled
from toolroll.rollout.types import (
    Action,
    Environment,
    EnvironmentOptions,
    Message,
    Observation,
    StepResult,
    Task,
    Tool,
)


@dataclass(frozen=True)
class Material:
    """The content of the recorded conversations.

    Attributes:
        first: The first messages of each conversation.
        tools: The tools, in OpenAI's format.
        replies: The text and the ids of each turn of the model.
        results: The contents of the tool messages.
        users: The contents of the user messages.
    """

    first: list[list[Message]]
    tools: list[Tool]
    replies: list[tuple[str, list[int]]]
    results: list[str]
    users: list[str]


def material(load: Workload, tok: Any) -> Material:
    """Return the material of the recorded conversations. The replies are the text that a model with
    the Hermes format would have sampled.
    """
    end = tok.convert_tokens_to_ids("<|im_end|>")
    replies: list[tuple[str, list[int]]] = []
    results: list[str] = []
    users: list[str] = []
    for conversation in load.conversations[:12]:
        for turn in conversation.turns[:20]:
            text = as_sampled(turn.assistant)
            replies.append((text, [*tok.encode(text, add_special_tokens=False), end]))
            for message in turn.new:
                (results if message["role"] == "tool" else users).append(message["content"])
    return Material(
        [conversation.first for conversation in load.conversations],
        load.tools,
        replies,
        results,
        users,
    )


class RecordedWorld(Environment):
    """An environment that is done after `turns` exchanges. `user_seconds`: the latency of the user;
    `blocking`: it blocks the thread meanwhile.
    """

    def __init__(
        self, given: Material, *, turns: int, user_seconds: float = 0.0, blocking: bool = False
    ) -> None:
        self.blocking = blocking
        self._given = given
        self._turns = turns
        self._seconds = user_seconds
        self._results: Iterator[str] = iter(())
        self._users: Iterator[str] = iter(())

    def reset(self, task: Task, seed: int) -> Observation:
        given, at = self._given, task.index
        self._results = itertools.islice(itertools.cycle(given.results), at, None)
        self._users = itertools.islice(itertools.cycle(given.users), at, None)
        return Observation(given.first[at % len(given.first)], given.tools)

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        self._turns -= 1
        if action.tool_calls or not self._seconds:
            return self._answer(action)
        if not self.blocking:
            return self._later(action)
        time.sleep(self._seconds)
        return self._answer(action)

    async def _later(self, action: Action) -> StepResult:
        await asyncio.sleep(self._seconds)
        return self._answer(action)

    def _answer(self, action: Action) -> StepResult:
        if self._turns <= 0:
            return StepResult((), 1.0, True)
        calls = action.tool_calls
        new: list[Message] = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": next(self._results),
            }
            for call in calls
        ]
        return StepResult(new or [{"role": "user", "content": next(self._users)}])


class RecordedFactory:
    """The factory of `RecordedWorld`."""

    name = "recorded"
    description = "recorded answers"
    splits: tuple[str, ...] = ("test",)

    def __init__(self, given: Material, *, turns: int, **settings: Any) -> None:
        self._given = given
        self._turns = turns
        self._settings = settings

    def missing(self) -> str | None:
        """Return None: no package is missing."""
        return None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return 4,096 tasks, more than any benchmark plays."""
        return [Task(f"recorded-{at}", at) for at in range(4096)]

    def make(self, options: EnvironmentOptions) -> RecordedWorld:
        """Return a new environment."""
        return RecordedWorld(self._given, turns=self._turns, **self._settings)

    def reference(self, task: Task) -> Sequence[Action] | None:
        """Return None: the stub has the replies."""
        return None


def call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the first call in a reply like the adapter of the published loop, by a search and a
    JSON decode.
    """
    begin, end = text.find("<tool_call>"), text.find("</tool_call>")
    if begin < 0 or end < 0:
        return None
    call = json.loads(text[begin + len("<tool_call>") : end])
    return call["name"], call["arguments"]
