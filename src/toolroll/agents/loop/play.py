"""`play`: plays one episode, from the first observation to the reward. No other code loops over
turns.

Invariants: any error in an episode becomes its stop reason and `info["error"]`, and the environment
is closed. Only `UsageError`, `EngineUnreachableError` and a cancellation by the caller are raised.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

from toolroll.agents.loop.call_policy import CallPolicy, order_by_call, reject_action
from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.loop.episode_tracker import EpisodeTracker
from toolroll.rollout.environment import Action, StepResult
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import (
    ActionError,
    EngineUnreachableError,
    ToolrollError,
    UsageError,
    message_of,
    place_of,
)
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.foreign import guarded
from toolroll.rollout.types import Message, Status, StopReason, Tool, Trajectory

logger = logging.getLogger(__name__)


class EpisodeConversation(Protocol):
    """The interface of conversations. `Conversation` has tokens. The others are subclasses of this
    class, whose methods do nothing, except for `reply`.
    """

    messages: list[Message]
    """The whole history."""

    @abstractmethod
    async def reply(self, sampling_params: Mapping[str, Any]) -> AssistantTurn:
        """Sample the next turn and add its message."""

    def extend(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> None:
        """Add the environment's messages, and `tools` if they changed."""
        return

    def exclude(self, turn: AssistantTurn, reason: str) -> None:
        """Exclude `turn` from training."""
        return

    async def settle(self) -> None:
        """Check the tokens at the end of the episode."""
        return

    def cancel_checks(self) -> None:
        """Cancel the running checks."""
        return


C = TypeVar("C", bound=EpisodeConversation)


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of one episode.

    `max_num_steps`: the maximum number of the model's turns. `on_length`: "stop" ends the episode
    after a turn that max_new_tokens truncated. `execute`: executes an action in the environment (an
    overridden `_execute_tool` replaces it).
    """

    policy: CallPolicy
    sampling_params: Mapping[str, Any]
    max_num_steps: int
    on_length: Literal["stop", "continue"] = "stop"
    execute: Callable[[EnvironmentRunner, Action], Awaitable[StepResult]] = EnvironmentRunner.step


@dataclass(slots=True)
class Played(Generic[C]):
    """An episode while it is running, and its outcome at the end. `conversation` is None if the
    reset failed.
    """

    runner: EnvironmentRunner
    tracker: EpisodeTracker = field(default_factory=EpisodeTracker)
    conversation: C | None = None
    reason: StopReason = StopReason.INTERNAL_ERROR
    reward: float | None = None
    turn_rewards: Sequence[float] = ()


async def play(
    runner: EnvironmentRunner,
    begin: Callable[[EpisodeTracker], Awaitable[C]],
    rules: Rules,
    *,
    session_id: str,
) -> Played[C]:
    """Play one episode and return its outcome. `begin` resets the environment and starts the
    conversation.
    """
    played: Played[C] = Played(runner)
    tracker, penalty = played.tracker, rules.policy.invalid_penalty
    try:
        with guarded():  # hooks and agents may be user code
            played.conversation = await begin(tracker)
            played.reason = await _Loop(played.conversation, runner, tracker, rules).play_turns()
            await played.conversation.settle()
            played.reward = await tracker.reward(played.reason, runner, penalty)
    except (asyncio.CancelledError, EngineUnreachableError):
        if played.conversation is not None:
            played.conversation.cancel_checks()
        raise
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - a failed episode is data (I7)
        reason = tracker.fail(error)
        text = message_of(error)
        if not isinstance(error, ToolrollError):
            text = f"{type(error).__name__}: {text}{place_of(error)}"
        task = runner.task.id
        logger.warning("episode %s of task %s ended with %s: %s", session_id, task, reason, text)
        if played.conversation is not None:
            await played.conversation.settle()
        played.reason, played.reward = await tracker.reward_after_error(reason, runner, penalty)
    finally:
        await to_its_end(tracker.close(runner, session_id))
    played.turn_rewards = tracker.rewards_of_turns(
        played.reward, summed=runner.env.reward_mode == "sum", penalty=penalty
    )
    return played


async def to_its_end(closing: Coroutine[Any, Any, None]) -> None:
    """Await `closing`. If the episode is cancelled in the meantime, raise `CancelledError` only
    after `closing` has ended.
    """
    task = asyncio.ensure_future(closing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@dataclass(frozen=True, slots=True)
class _Loop:
    """The loop over the turns of one episode."""

    conversation: EpisodeConversation
    runner: EnvironmentRunner
    tracker: EpisodeTracker
    rules: Rules

    async def play_turns(self) -> StopReason:
        """Repeat sample, decide, act and observe until the episode is over."""
        conversation, tracker, rules = self.conversation, self.tracker, self.rules
        for _ in range(rules.max_num_steps):
            turn = await conversation.reply(rules.sampling_params)
            invalid_replies = tracker.counts["invalid_replies"]
            tracker.turn(turn, len(conversation.messages) - 1)
            if turn.finish_reason == "abort":
                return StopReason.ENGINE_ABORT
            if turn.finish_reason == "placeholder":
                return StopReason.PLACEHOLDER
            if turn.finish_reason == "length" and rules.on_length == "stop":
                return StopReason.LENGTH
            decision = rules.policy.decide(turn.parsed, invalid_before=tracker.invalid_in_a_row)
            if decision.invalid:
                self._invalid(turn)
            if decision.stop:
                return StopReason.INVALID_CALLS
            step = StepResult()
            if decision.action is not None:
                step = await self._act(turn, decision.action)
            if tracker.counts["invalid_replies"] == invalid_replies:  # this one was valid
                tracker.invalid_in_a_row = 0
            messages = (*decision.messages, *step.messages)
            answers = order_by_call(turn.parsed.tool_calls, decision.answers, messages)
            conversation.extend(answers, step.tools)
            if step.done:
                return StopReason.DONE
            if tracker.invalid_in_a_row >= rules.policy.max_invalid_in_a_row:
                return StopReason.INVALID_CALLS
        return StopReason.MAX_TURNS

    async def _act(self, turn: AssistantTurn, action: Action) -> StepResult:
        """Execute `action`. The text of an `ActionError` becomes the observation."""
        self.tracker.executed(action.tool_calls)
        try:
            step = await self.rules.execute(self.runner, action)
        except ActionError as error:
            self._invalid(turn)
            return StepResult(reject_action(action, str(error)))
        self.tracker.step(step)
        return step

    def _invalid(self, turn: AssistantTurn) -> None:
        self.tracker.invalid_reply()
        if self.rules.policy.mask_invalid:
            self.conversation.exclude(turn, "invalid call")


def build_result(
    played: Played[Any], tools: Sequence[Tool] = (), *, trainable: bool = True
) -> InteractionResult:
    """Return the result of an episode. It has tokens if the conversation has any.

    `tools`: the tools to report if the episode ended before its conversation started.
    """
    tracker, conversation = played.tracker, played.conversation
    metrics = tracker.metrics(played.runner.metrics())
    trajectories: tuple[Trajectory, ...] = ()
    messages: list[Message] = []
    prompt = ""
    if conversation is not None:
        messages, tools = conversation.messages, conversation.tools
    tracker.info = {**played.runner.drawn, **tracker.info}
    if tracker.bad_calls:
        tracker.info["bad_calls"] = tracker.bad_calls
    if not trainable:
        tracker.info["trainable"] = False
    elif isinstance(conversation, Conversation):
        trajectories = rewarded(conversation.session.trajectories(), played.turn_rewards)
        prompt = conversation.first_prompt
        metrics["forks"] = float(len(conversation.forks))
        aborted = played.reason.status is Status.ABORTED  # then no trainer gets the tokens
        trained = () if aborted else [trajectory.trained_tokens for trajectory in trajectories]
        metrics["trained_tokens"] = float(sum(trained))
        for kind, count in conversation.mismatches.items():
            metrics[f"token_mismatches/{kind}"] = float(count)
        if conversation.forks:
            tracker.info["forks"] = list(conversation.forks)
    return InteractionResult.of(
        trajectories,
        messages=messages,
        stop_reason=played.reason,
        prompt=prompt,
        reward=played.reward,
        info=tracker.info,
        metrics=metrics,
        step_rewards=tuple(tracker.rewards),
        tools=list(tools),
    )


def rewarded(
    trajectories: Sequence[Trajectory], rewards: Sequence[float]
) -> tuple[Trajectory, ...]:
    """Return `trajectories` with the turns' `rewards`, which are in the order of the episode.

    After a fork, a sequence may contain a turn of an earlier sequence as context. Such a turn gets
    no reward here, because its reward is in the sequence that trains it.
    """
    remaining = iter(rewards)
    return tuple(
        replace(
            trajectory,
            turns=tuple(
                turn if turn.excluded == "context" else replace(turn, reward=next(remaining, 0.0))
                for turn in trajectory.turns
            ),
        )
        for trajectory in trajectories
    )
