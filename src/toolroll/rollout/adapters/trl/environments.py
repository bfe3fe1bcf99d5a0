"""Environments for TRL's `environment_factory`. With them, TRL plays the episode: TRL's own loop
samples, and calls the environment's tools as methods.

TRL ends an episode with the first reply that has no call, and passes this reply only to reward
functions. `finish_episodes` is a reward function that passes the reply to the environment, which
then grades the episode. So put `finish_episodes` first in `reward_funcs`. If the environment
answers such a reply (as a user does), the reward is None. For such environments, use
`make_rollout_func`.

An episode's environment is closed by the next `reset`, or when the instance is garbage-collected,
at the latest when the interpreter ends. If `reset` raises an error, the new environment
is closed at once.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from toolroll.parsers.types import ToolCall
from toolroll.rollout.adapters.background import Background
from toolroll.rollout.adapters.episodes import task_index
from toolroll.rollout.adapters.trl.tools import tool_method
from toolroll.rollout.errors import ActionError, EnvironmentFailure, UsageError
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.runs.runner import episode_seed
from toolroll.rollout.runtime.jsonable import finite, shown
from toolroll.rollout.types import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentOptions,
    Observation,
    StepResult,
    Task,
    Tool,
)


class _Episode:
    """Plays episodes one after another, because TRL resets the same instance for each episode."""

    factory: EnvironmentFactory
    tasks: Sequence[Task]
    seed: int
    names: tuple[str, ...]
    _background = Background("toolroll-trl")

    def __init__(self) -> None:
        self._environment: Environment | None = None
        self._closing: weakref.finalize[[Environment, Background], _Episode] | None = None
        self._over = self._failed = False
        self._rewards: list[float] = []

    def reset(self, **row: Any) -> str:
        """Start the task with the index `row["index"]` and return the user's first message. Raise
        `UsageError` if TRL cannot play the task, for example because the task's tools differ from
        those of the first task.
        """
        self._close()
        if "index" not in row:
            raise UsageError("a row has no column 'index': make the rows with environment_rows")
        task = _task(self.factory, self.tasks, row["index"])
        self._over, self._failed, self._rewards = False, False, []
        self._environment = self.factory.make(EnvironmentOptions())
        self._closing = weakref.finalize(
            self, _close_environment, self._environment, self._background
        )
        try:
            return self._first_message(self._environment, task, row)
        except BaseException:
            self._close()
            raise

    def _first_message(self, environment: Environment, task: Task, row: Mapping[str, Any]) -> str:
        seed = episode_seed(self.seed, task.id, 0)
        observation: Observation = self._await(environment.reset(task, seed))
        if tuple(sorted(_names(observation.tools))) != self.names:
            raise UsageError(
                f"{self.factory.name}: the tools of the task {task.id} differ from those of the "
                "first task, but TRL takes one list of tools for all tasks: use make_rollout_func"
            )
        system, user = _opening(self.factory, task, observation)
        _check_system(row.get("prompt"), system, task)
        return user

    def get_reward(self) -> float | None:
        """Return the reward, or None if the episode failed or the environment did not end it."""
        if self._environment is None or self._failed or not self._over:
            return None
        if self._environment.reward_mode == "sum":
            return math.fsum(self._rewards)
        return self._rewards[-1] if self._rewards else 0.0

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Execute one call and return the text that the model sees."""
        if self._over:
            return "Error: the episode is over"
        call = ToolCall(name, dict(arguments), "", id=f"{name}_call")
        try:
            result = self._step(Action("", (call,)))
        except ActionError as error:
            return str(error)
        return "\n".join(str(message.get("content", "")) for message in result.messages)

    def _finish(self, reply: str | None) -> None:
        """Give the environment the reply that ended the episode. `reply` is None if a token limit
        ended the episode: then the environment's `truncated_reward` is the reward.
        """
        if self._environment is None or self._over or self._failed:
            return
        if reply is None:
            self._over = True
            reward = _checked_reward(self._environment.truncated_reward())
            if reward is not None or self._environment.reward_mode == "final":
                self._rewards = [0.0 if reward is None else reward]
            return
        try:
            self._step(Action(reply))
        except ActionError:
            return

    def _step(self, action: Action) -> StepResult:
        assert self._environment is not None
        done = False
        try:
            result: StepResult = self._await(self._environment.step(action))
            reward = _checked_reward(result.reward)
            done = result.done
        except ActionError:
            raise
        except BaseException:
            self._failed = True
            raise
        self._over = done
        if reward is not None:
            self._rewards.append(reward)
        return result

    def _close(self) -> None:
        if self._closing is not None:
            self._closing()
        self._environment = self._closing = None

    def _await(self, value: Any) -> Any:
        return self._background.run(_awaited(value)) if inspect.isawaitable(value) else value


def _checked_reward(reward: Any) -> float | None:
    value = finite(reward)
    if value is None and reward is not None:
        raise EnvironmentFailure(
            f"the environment gave the reward {shown(reward)}: it must be a finite number or None"
        )
    return value


def _close_environment(environment: Environment, background: Background) -> None:
    closing: Any = environment.close()
    if inspect.isawaitable(closing):
        background.finish(_awaited(closing))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def environment_class(
    env: str,
    *,
    split: str | None = None,
    env_args: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Callable[[], Any]:
    """Return a class for `GRPOTrainer(environment_factory=...)` that plays the environment `env`.

    The public methods of the class are the tools. Their signatures and docstrings come from the
    tools' schemas. Raise `UsageError` for a tool that cannot be a Python method, for example
    because it has a parameter `from`.

    Example:
        >>> Desk = environment_class("desk")
        >>> trainer = GRPOTrainer(
        ...     model,
        ...     environment_factory=Desk,
        ...     reward_funcs=[finish_episodes],
        ...     train_dataset=Dataset.from_list(environment_rows("desk")),
        ... )  # doctest: +SKIP
    """
    factory, tasks = _tasks(env, split, env_args)
    tools = _first(factory, tasks, seed).tools
    members: dict[str, Any] = {
        "factory": factory,
        "tasks": tasks,
        "seed": seed,
        "names": tuple(sorted(_names(tools))),
        **{tool["function"]["name"]: tool_method(tool) for tool in tools},
    }
    taken = {"reset", "get_reward", "factory", "tasks", "seed", "names"} & set(_names(tools))
    if taken:
        raise UsageError(f"{env}: TRL uses the name {min(taken)!r} itself: rename the tool")
    title = "".join(part.capitalize() for part in factory.name.replace("/", "-").split("-"))
    return type(title if title.isidentifier() else "ToolrollEnvironment", (_Episode,), members)


def environment_rows(
    env: str,
    *,
    split: str | None = None,
    env_args: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the rows of a data set for `environment_class`. Each row has `prompt` (the system
    message and an empty user message, which `reset` fills) and `index`.
    """
    factory, tasks = _tasks(env, split, env_args)
    rows = []
    for task in tasks:
        system, _ = _opening(factory, task, _first(factory, [task], seed))
        prompt = [] if system is None else [{"role": "system", "content": system}]
        rows.append({"prompt": [*prompt, {"role": "user", "content": ""}], "index": task.index})
    return rows


def finish_episodes(
    completions: Sequence[Any],
    environments: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    **others: Any,
) -> list[float | None]:
    """Pass the last reply of each episode to its environment. This function is for `reward_funcs`,
    but returns None for each reward.

    A reply that `max_completion_length` truncated is not passed on. Such an episode gets the
    environment's `truncated_reward`.
    """
    ends = _end_tokens(others.get("log_metric"))
    given = [()] * len(completions) if completion_ids is None else completion_ids
    for completion, environment, ids in zip(completions, environments, given, strict=True):
        last = completion[-1]
        replied = last["role"] == "assistant" and not last.get("tool_calls")
        cut = bool(ends and len(ids) and int(ids[-1]) not in ends)
        text = str(last.get("content") or "")
        environment._finish(text if replied and not cut else None)
    return [None] * len(completions)


def _end_tokens(log_metric: Any) -> frozenset[int]:
    """Return the trainer's `eos_token_ids`, or else the tokenizer's `eos_token_id`. Return an empty
    set if the caller is not TRL.

    TRL 1.16 passes reward functions neither the trainer nor the tokenizer. But it passes
    `log_metric`, which is a method of the trainer.
    """
    trainer = getattr(log_metric, "__self__", None)
    ids = getattr(trainer, "eos_token_ids", None)
    if ids is None:
        ids = getattr(getattr(trainer, "processing_class", None), "eos_token_id", None)
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)


def _tasks(
    env: str, split: str | None, settings: Mapping[str, Any] | None
) -> tuple[EnvironmentFactory, Sequence[Task]]:
    factory = load_environment(env, settings)
    return factory, factory.tasks(split or factory.splits[0])


def _task(factory: EnvironmentFactory, tasks: Sequence[Task], index: Any) -> Task:
    at = task_index(index)
    if at >= len(tasks):
        raise UsageError(f"{factory.name} has tasks 0 to {len(tasks) - 1}; the row's index is {at}")
    return tasks[at]


def _first(factory: EnvironmentFactory, tasks: Sequence[Task], seed: int) -> Observation:
    """Return the first observation of the first task in `tasks`."""
    probe = type("_Probe", (_Episode,), {})()
    environment = factory.make(EnvironmentOptions())
    try:
        found: Observation = probe._await(
            environment.reset(tasks[0], episode_seed(seed, tasks[0].id, 0))
        )
        return found
    finally:
        probe._await(environment.close())


def _opening(
    factory: EnvironmentFactory, task: Task, observation: Observation
) -> tuple[str | None, str]:
    """Return the texts of the system message and the user message. The first is None if there is no
    system message.
    """
    messages = list(observation.messages)
    system = messages.pop(0) if messages and messages[0]["role"] == "system" else None
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise UsageError(
            f"{factory.name}: TRL needs an optional system message and one user message as the "
            f"beginning, but the task {task.id} has other messages: use make_rollout_func"
        )
    return None if system is None else str(system["content"]), str(messages[0]["content"])


def _check_system(prompt: Any, system: str | None, task: Task) -> None:
    """Raise `UsageError` if the row's system message differs from the environment's."""
    if prompt is None and system is None:
        return
    shown = [one["content"] for one in prompt or () if one["role"] == "system"]
    if shown != ([] if system is None else [system]):
        raise UsageError(
            f"the prompt of the row for the task {task.id} does not have the environment's system "
            "message: make the rows with environment_rows"
        )


def _names(tools: Sequence[Tool]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]
