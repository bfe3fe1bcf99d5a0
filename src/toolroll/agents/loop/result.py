"""Make the `InteractionResult` of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolroll.agents.loop.play import Played
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.types import InteractionResult, Message, Tool, Trajectory


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
    if tracker.bad_calls:
        tracker.info["bad_calls"] = tracker.bad_calls
    if not trainable:
        tracker.info["trainable"] = False
    elif isinstance(conversation, Conversation):
        trajectories = rewarded(conversation.session.trajectories(), played.turn_rewards)
        prompt = conversation.first_prompt
        metrics["forks"] = float(len(conversation.forks))
        trained = [trajectory.trained_tokens for trajectory in trajectories]
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
    left = iter(rewards)
    return tuple(
        replace(
            trajectory,
            turns=tuple(
                turn if turn.excluded == "context" else replace(turn, reward=next(left, 0.0))
                for turn in trajectory.turns
            ),
        )
        for trajectory in trajectories
    )
