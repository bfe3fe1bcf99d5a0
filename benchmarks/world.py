"""The environment of the loops: it answers a call with the next recorded tool result, and a text
with the next line of the user. Digits differ in each episode, so that no result comes twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.conversations import Turn, Workload, as_sampled, other_digits
from toolroll.rollout.environment import (
    Action,
    Environment,
    EnvironmentOptions,
    Observation,
    StepResult,
    Task,
)
from toolroll.rollout.types import Message, Tool

TURNS = 20
VARIANTS = 20
_episodes = itertools.count()


@dataclass(frozen=True)
class Material:
    """The content of the conversations.

    Attributes:
        first: The first messages of each conversation.
        tools: The tools, in OpenAI's format.
        results: The contents of the tool messages.
        users: The contents of the user messages.
    """

    first: list[list[Message]]
    tools: list[Tool]
    results: list[str]
    users: list[str]


def material(load: Workload) -> Material:
    """Return the material of the conversations."""
    new = [message for turn in _turns(load) for message in turn.new]
    return Material(
        [talk.first for talk in load.conversations],
        load.tools,
        [message["content"] for message in new if message["role"] == "tool"],
        [message["content"] for message in new if message["role"] == "user"],
    )


def replies(load: Workload, tok: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield the text and the ids that a model with the Hermes format would have sampled for each
    turn, in `VARIANTS` with other digits.
    """
    end = tok.convert_tokens_to_ids("<|im_end|>")
    texts = [as_sampled(turn.assistant) for turn in _turns(load)]
    for variant in range(VARIANTS):
        for text in map(other_digits(variant), texts):
            # with other digits, a number may begin with 0, which is not JSON
            if call_of(text) is not None or "<tool_call>" not in text:
                yield text, [*tok.encode(text, add_special_tokens=False), end]


def _turns(load: Workload) -> list[Turn]:
    return [turn for talk in load.conversations[:12] for turn in talk.turns[:TURNS]]


class RecordedWorld(Environment):
    """An environment that is done after `turns` exchanges. The user takes `user_seconds`, and the
    first observation comes after `start_seconds`.
    """

    blocking = False

    def __init__(
        self,
        given: Material,
        *,
        turns: int = TURNS,
        user_seconds: float = 0.0,
        start_seconds: float = 0.0,
    ) -> None:
        self._given = given
        self._turns = turns
        self._user_seconds = user_seconds
        self._start_seconds = start_seconds
        self._other: Callable[[str], str] = str
        self._results: Iterator[str] = iter(())
        self._users: Iterator[str] = iter(())

    async def reset(self, task: Task, seed: int) -> Observation:
        given, start = self._given, task.index
        self._other = other_digits(next(_episodes))
        self._results = itertools.islice(itertools.cycle(given.results), start, None)
        self._users = itertools.islice(itertools.cycle(given.users), start, None)
        if self._start_seconds:
            await asyncio.sleep(self._start_seconds)
        return Observation(given.first[start % len(given.first)], given.tools)

    async def step(self, action: Action) -> StepResult:
        self._turns -= 1
        if not action.tool_calls and self._user_seconds:
            await asyncio.sleep(self._user_seconds)
        if self._turns <= 0:
            return StepResult((), 1.0, True)
        new: list[Message] = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": self._other(next(self._results)),
            }
            for call in action.tool_calls
        ]
        return StepResult(new or [{"role": "user", "content": self._other(next(self._users))}])


class RecordedFactory:
    """The factory of `RecordedWorld`. The first episodes start one after another within
    `spread_seconds`, so that afterwards conversations of every length are running.
    """

    name = "recorded"
    description = "recorded answers"
    splits: tuple[str, ...] = ("test",)

    def __init__(
        self,
        given: Material,
        *,
        user_seconds: float = 0.0,
        episodes: int = 0,
        spread_seconds: float = 0.0,
    ) -> None:
        self._given = given
        self._user_seconds = user_seconds
        starts = [at * spread_seconds / episodes for at in range(episodes)]
        self._starts = iter(starts)

    def missing(self) -> str | None:
        """Return None: no package is missing."""
        return None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return 4,096 tasks, more than any benchmark plays at once."""
        return [Task(f"recorded-{at}", at) for at in range(4096)]

    def make(self, options: EnvironmentOptions) -> RecordedWorld:
        """Return a new environment."""
        return RecordedWorld(
            self._given,
            user_seconds=self._user_seconds,
            start_seconds=next(self._starts, 0.0),
        )

    def reference(self, task: Task) -> Sequence[Action] | None:
        """Return None: the stub has the replies."""
        return None


def call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the first call in a reply like the adapter of the published loop, by a search and a
    JSON decode. None if there is none, or if it is not JSON.
    """
    begin, end = text.find("<tool_call>"), text.find("</tool_call>")
    if begin < 0 or end < 0:
        return None
    try:
        call = json.loads(text[begin + len("<tool_call>") : end])
    except ValueError:
        return None
    return call["name"], call["arguments"]
