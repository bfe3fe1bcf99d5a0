"""Puts one episode's `InteractionResult` together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.loop.episode_tracker import EpisodeTracker
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.types import InteractionResult, StopReason, Tool, Trajectory, status_of


def build_result(
    runner: EnvironmentRunner,
    conversation: Conversation | None,
    tracker: EpisodeTracker,
    reason: StopReason,
    reward: float | None,
    tools: Sequence[Tool],
) -> InteractionResult:
    """Everything but the published fields over the response, which `_build_final_result` fills."""
    trajectories = conversation.session.trajectories() if conversation else ()
    last = trajectories[-1] if trajectories else None
    metrics = tracker.metrics(runner.metrics())
    if conversation is not None:
        metrics["forks"] = float(len(conversation.forks))
        metrics["trained_tokens"] = float(sum(trajectory.trained_tokens for trajectory in trajectories))
        metrics |= {f"token_mismatches/{kind}": float(count) for kind, count in conversation.mismatches.items()}
        if conversation.forks:
            tracker.info["forks"] = list(conversation.forks)
    return InteractionResult(
        prompt=conversation.first_prompt if conversation else "",
        reward=reward,
        messages=conversation.messages if conversation else [],
        info=tracker.info,
        status=status_of(reason),
        stop_reason=reason,
        logprobs=_response_logprobs(last),
        weight_versions=last.weight_versions if last else (),
        trajectories=trajectories,
        metrics=metrics,
        step_rewards=tuple(tracker.rewards),
        tools=list(conversation.tools if conversation else tools),
    )


def _response_logprobs(trajectory: Trajectory | None) -> object:
    if trajectory is None:
        return np.zeros(0, dtype=np.float32)
    return trajectory.logprobs[trajectory.prompt_length :]
