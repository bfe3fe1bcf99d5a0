"""The interfaces of environments, and what passes between them and an agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from toolroll.parsers.types import ToolCall
from toolroll.rollout.types import Message, Tool

ParallelCalls = Literal["all", "first", "refuse"]
"""What to do with several tool calls in one turn: execute all in order, only the first, or none."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Versions of the library do not change its `id`. `index`: its place in the split."""

    id: str
    index: int
    split: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Action:
    """The agent's action in one step: `content` without reasoning, and executable `tool_calls`."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of `Environment.reset`: the first messages (system and user), the tools, and
    further data in `info`.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of `Environment.step`: messages of tools (one per call, with its `tool_call_id`)
    and of users, the reward of this step, and the new list of tools if it changed.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    tools: Sequence[Tool] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """The environment of one episode. It is made by an `EnvironmentFactory`, played, and closed.

    Methods may be plain or `async`. Plain methods run in a thread, off the event loop. If the model
    makes a mistake, raise `ActionError` in `step`: the model gets the message as the observation.
    Any other exception in `reset`, `step` or `truncated_reward`, even `SystemExit` or
    `CancelledError`, aborts this episode and no other.

    Example:

        class Guess(Environment):
            def reset(self, task: Task, seed: int) -> Observation:
                self.secret = random.Random(seed).randint(1, 9)
                return Observation([{"role": "user", "content": "Guess a digit from 1 to 9."}])

            def step(self, action: Action) -> StepResult:
                return StepResult(reward=float(str(self.secret) in action.content), done=True)
    """

    reward_mode: Literal["final", "sum"] = "final"
    """The episode's reward is the reward of its last step ("final"), or of all steps ("sum")."""

    parallel_calls: ParallelCalls = "all"
    """How to handle several tool calls in one turn. An agent's `CallPolicy` can override it."""

    blocking: bool = True
    """False if plain `reset` and `step` take only microseconds, and may run on the event loop."""

    can_wait: bool = True
    """False if an aborted episode must not be parked: it then starts again."""

    def check_task(self, task: Task) -> None:
        """Raise `UsageError` if `task` cannot be played. `toolroll run` asks before any `reset`."""
        return

    @abstractmethod
    def reset(self, task: Task, seed: int) -> Observation | Awaitable[Observation]:
        """Start `task`. Derive all randomness from `seed`."""

    @abstractmethod
    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Execute `action`. This is not called after `done`."""

    def truncated_reward(self) -> float | Awaitable[float | None] | None:
        """Return the reward of an episode that ended before `done`, for example at a limit of turns
        or tokens. None means 0.0, or the sum of the step rewards if `reward_mode` is "sum".
        """
        return None

    def metrics(self) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Return finite numbers about this episode. This is called once, after the last step.

        Names other than `tool_errors`, `tool_errors/TOOL` and `user_*` get the prefix `env/`.
        Other values are left out. `info["metrics_error"]` names them, or an exception raised here.
        """
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release the resources of `reset`. This is called exactly once, even after a failure."""
        return None


class UserSimulator(Protocol):
    """The simulated user of one episode. It raises `UserSimulatorError` if it fails."""

    async def reset(self, instruction: str) -> str:
        """Return the user's first message."""
        ...

    async def step(self, content: str) -> str:
        """Return the user's answer to the agent's visible text."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return numbers about this user's requests, such as `user_calls` and `user_seconds`."""
        return {}

    async def close(self) -> None:
        """Release the simulator's resources, such as its connection. By default, it has none."""
        return


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """A run's options for each environment: the user simulator and the environment's settings."""

    user: Callable[[int], UserSimulator] | None = None
    """`user(seed)` returns the user simulator of one episode."""
    settings: Mapping[str, Any] = field(default_factory=dict)


class EnvironmentFactory(Protocol):
    """A named environment. An entry point in the group `toolroll.environments` names a factory, a
    class or function that makes one, or an `Environment` class.
    """

    name: str
    description: str
    splits: tuple[str, ...]
    """The names of the splits. The first one is the default."""

    def missing(self) -> str | None:
        """Return the command that installs what is missing, or None if nothing is missing."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of `split`, in order. Raise `UsageError` for an unknown split."""
        ...

    def make(self, options: EnvironmentOptions) -> Environment:
        """Return a new environment for one episode."""
        ...

    def reference(self, task: Task) -> Sequence[Action] | None:
        """Return the actions that solve `task`, one per step, or None if there are none."""
        ...
