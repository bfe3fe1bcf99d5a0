"""`EpisodeTracker`: the rewards, info and counters of one episode."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from toolroll.agents.loop.environment_results import checked_reward
from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import StepResult
from toolroll.rollout.errors import (
    ActionError,
    ContextOverflowError,
    EngineError,
    EnvironmentFailure,
    RolloutError,
    TemplateError,
    TimeLimitError,
    TokenError,
    UsageError,
    UserSimulatorError,
    describe,
    message_of,
)
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.types import Status, StopReason

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EpisodeTracker:
    """The rewards, info and counters of a running episode."""

    info: dict[str, Any] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    bad_calls: list[dict[str, int | str]] = field(default_factory=list)
    invalid_in_a_row: int = 0
    engine_seconds: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    """The step reward of each turn."""
    invalid_turns: list[int] = field(default_factory=list)
    began: float = field(default_factory=perf_counter)

    def turn(self, turn: AssistantTurn, index: int) -> None:
        """Count one turn of the model. `index`: the position of its message."""
        self.counts["turns"] += 1
        self.turn_rewards.append(0.0)
        self.counts["tool_calls"] += len(turn.parsed.tool_calls)
        if turn.parsed.lookalikes:
            self.counts["lookalike_calls"] += len(turn.parsed.lookalikes)
        for name, count in turn.counts.items():
            self.counts[name] += count
        for position, call in enumerate(turn.parsed.tool_calls):
            if not call.ok:
                self.counts["invalid_calls"] += 1
                self.counts[f"invalid_calls/{call.status}"] += 1
                status = call.status.value
                self.bad_calls.append({"message": index, "call": position, "status": status})
        self.engine_seconds += turn.seconds

    def step(self, result: StepResult) -> None:
        """Add the reward and the info of one step."""
        if result.reward is not None:
            self.rewards.append(result.reward)
            self.turn_rewards[-1] += result.reward
        # None is not new information: tau-bench sends every field with each step, mostly as None.
        for key, value in result.info.items():
            if value is not None or key not in self.info:
                self.info[key] = value

    def executed(self, calls: Sequence[ToolCall]) -> None:
        """Count `calls`, which are passed to the environment, by tool."""
        for call in calls:
            self.counts[f"executed_calls/{call.name}"] += 1

    def invalid_reply(self) -> None:
        """Count a reply that has an invalid call, or whose action raised an `ActionError`."""
        self.counts["invalid_replies"] += 1
        self.invalid_turns.append(len(self.turn_rewards) - 1)
        self.invalid_in_a_row += 1

    def rewards_of_turns(
        self, reward: float | None, *, summed: bool, penalty: float
    ) -> list[float]:
        """Return each turn's share of the episode's `reward`. The shares add up to `reward`.

        If the step rewards are `summed`, each turn gets the reward of its step. `penalty` is added
        for each invalid turn. The last turn gets the rest of `reward`, such as the reward for a
        truncated episode.
        """
        if reward is None or not self.turn_rewards:
            return []
        shares = list(self.turn_rewards) if summed else [0.0] * len(self.turn_rewards)
        for turn in self.invalid_turns:
            shares[turn] += penalty
        shares[-1] += reward - math.fsum(shares)
        return shares

    def fail(self, error: Exception) -> StopReason:
        """Record `error`, which ended the episode. Return the episode's stop reason."""
        self.info["error"] = describe(error)
        return reason_of(error)

    async def reward(
        self, reason: StopReason, runner: EnvironmentRunner, penalty: float
    ) -> float | None:
        """Return the episode's reward, or None if it was aborted.

        The reward is the last step's reward, or the sum of all step rewards if the environment's
        `reward_mode` is "sum". If the environment did not end the episode, or gave no reward, the
        reward is what its `truncated_reward` returns. If `truncated_reward` returns None, the
        reward is the sum so far in the mode "sum", and 0.0 otherwise. `penalty` is added for each
        invalid reply (see `invalid_reply`).
        """
        if reason.status is Status.ABORTED:
            return None
        total = runner.env.reward_mode == "sum"
        ended_by_environment = reason is StopReason.DONE and self.rewards
        reward = None if ended_by_environment else await runner.truncated_reward()
        if reward is None:
            last = self.rewards[-1] if ended_by_environment else 0.0
            reward = sum(self.rewards) if total else last
        return checked_reward(
            "the sum of the step rewards", reward + penalty * self.counts["invalid_replies"]
        )

    async def reward_after_error(
        self, reason: StopReason, runner: EnvironmentRunner, penalty: float
    ) -> tuple[StopReason, float | None]:
        """Return the stop reason and the reward of an episode that ended with an error.

        If the context was full, even for the first prompt, the reward is that of a truncated
        episode. For any other error, the reward is None.
        """
        if reason is not StopReason.CONTEXT_FULL:
            return reason, None
        try:
            reward = await self.reward(reason, runner, penalty)
        except RolloutError as error:
            return self.fail(error), None
        return reason, reward

    async def close(self, runner: EnvironmentRunner, session_id: str) -> None:
        """Read the environment's metrics and close it. An error does not fail the episode: it is
        logged, counted, and becomes `metrics_error` or `close_error` in `info`.
        """
        for name, call in (("metrics", runner.measure), ("close", runner.close)):
            try:
                await call()
            except (ActionError, RolloutError, UsageError) as error:
                logger.warning(
                    "episode %s of task %s: the environment's %s failed: %s",
                    session_id,
                    runner.task.id,
                    name,
                    message_of(error),
                )
                self.info[f"{name}_error"] = describe(error)
                self.counts[f"{name}_errors"] += 1

    def metrics(self, extra: Mapping[str, float]) -> dict[str, float]:
        """Return all metrics of the episode, including `extra`."""
        counted = {
            **self.counts,
            "engine_seconds": self.engine_seconds,
            "seconds": perf_counter() - self.began,
        }
        return {**{name: float(value) for name, value in counted.items()}, **extra}


def reason_of(error: Exception) -> StopReason:
    """Return the stop reason for an episode that ended with `error`."""
    for kinds, reason in _REASONS_OF_ERRORS:
        if isinstance(error, kinds):
            return reason
    return StopReason.INTERNAL_ERROR


_REASONS_OF_ERRORS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], StopReason], ...] = (
    (ContextOverflowError, StopReason.CONTEXT_FULL),
    (EngineError, StopReason.ENGINE_ERROR),
    (UserSimulatorError, StopReason.USER_ERROR),
    (TimeLimitError, StopReason.TIME_LIMIT),
    (TokenError, StopReason.TOKEN_ERROR),
    (TemplateError, StopReason.TEMPLATE_ERROR),
    (EnvironmentFailure, StopReason.ENVIRONMENT_ERROR),
)
