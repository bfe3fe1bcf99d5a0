"""Puts one episode's `InteractionResult` together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.loop.episode_tracker import EpisodeRecord
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.types import InteractionResult, StopReason, Tool, Trajectory, status_of


def build_result(
    world: EnvironmentRunner,
    dialogue: Conversation | None,
    record: EpisodeRecord,
    reason: StopReason,
    reward: float | None,
    tools: Sequence[Tool],
) -> InteractionResult:
    """Everything but the published fields over the response, which `_build_final_result` fills."""
    trajectories = dialogue.session.trajectories() if dialogue else ()
    last = trajectories[-1] if trajectories else None
    metrics = record.metrics(world.metrics())
    if dialogue is not None:
        metrics["forks"] = float(len(dialogue.forks))
        metrics["trained_tokens"] = float(sum(trajectory.trained_tokens for trajectory in trajectories))
        metrics |= {f"token_mismatches/{kind}": float(count) for kind, count in dialogue.mismatches.items()}
        if dialogue.forks:
            record.info["forks"] = list(dialogue.forks)
    return InteractionResult(
        prompt=dialogue.first_prompt if dialogue else "",
        reward=reward,
        messages=dialogue.messages if dialogue else [],
        info=record.info,
        status=status_of(reason),
        stop_reason=reason,
        logprobs=_response_logprobs(last),
        weight_versions=last.weight_versions if last else (),
        trajectories=trajectories,
        metrics=metrics,
        step_rewards=tuple(record.rewards),
        tools=list(dialogue.tools if dialogue else tools),
    )


def _response_logprobs(trajectory: Trajectory | None) -> object:
    if trajectory is None:
        return np.zeros(0, dtype=np.float32)
    return trajectory.logprobs[trajectory.prompt_length :]
