"""A played episode and its result, and the interface of the agents that play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from toolroll.rollout.environment import Task
from toolroll.rollout.types import Message, Status, StopReason, Tool, Trajectory, WeightVersion


@dataclass
class InteractionResult:
    """The result of an episode. Fields up to `response_length` are as in slime's tau-bench example.

    `tokens` (prompt and response), `loss_mask` and `logprobs` (both for the response only) are
    lists of the last trajectory, which contains the conversation as it ended. `logprobs` has 0.0
    for tokens that were not sampled, and is None if a token with mask 1 has no logprob. If the
    session forked, `trajectories` contains every sequence, and a trainer must use all of them.
    `reward` is None for an ABORTED episode.
    """

    prompt: str = field(repr=False)
    reward: float | None
    messages: list[Message] = field(repr=False)
    info: dict[str, Any]
    response: str = field(default="", repr=False)
    loss_mask: list[int] = field(default_factory=list, repr=False)
    tokens: list[int] = field(default_factory=list, repr=False)
    status: Status = Status.COMPLETED
    response_length: int = 0
    logprobs: list[float] | None = field(default=None, repr=False)
    weight_versions: tuple[WeightVersion, ...] = field(default=(), repr=False)
    trajectories: tuple[Trajectory, ...] = ()
    stop_reason: StopReason = StopReason.DONE
    metrics: dict[str, float] = field(default_factory=dict, repr=False)
    step_rewards: tuple[float, ...] = ()
    tools: list[Tool] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        *,
        prompt: str,
        reward: float | None,
        messages: list[Message],
        info: dict[str, Any],
        stop_reason: StopReason,
        metrics: Mapping[str, float] | None = None,
        step_rewards: Sequence[float] = (),
        tools: Sequence[Tool] = (),
    ) -> InteractionResult:
        """Return a result whose token and response fields come from the last trajectory."""
        last = trajectories[-1] if trajectories else None
        return cls(
            prompt,
            reward,
            messages,
            info,
            response=response_text(messages),
            loss_mask=last.loss_mask[last.prompt_length :].tolist() if last else [],
            tokens=last.input_ids.tolist() if last else [],
            status=stop_reason.status,
            response_length=last.response_length if last else 0,
            logprobs=_response_logprobs(last) if last else [],
            weight_versions=last.weight_versions if last else (),
            trajectories=tuple(trajectories),
            stop_reason=stop_reason,
            metrics=dict(metrics or {}),
            step_rewards=tuple(step_rewards),
            tools=list(tools),
        )


def _response_logprobs(trajectory: Trajectory) -> list[float] | None:
    if np.isnan(trajectory.logprobs[trajectory.loss_mask != 0]).any():
        return None
    logprobs = trajectory.logprobs[trajectory.prompt_length :]
    plain: list[float] = np.where(np.isnan(logprobs), 0.0, logprobs).tolist()
    return plain


def response_text(messages: Sequence[Message]) -> str:
    """Return the contents of all assistant messages, joined without a separator."""
    return "".join(str(m.get("content") or "") for m in messages if m.get("role") == "assistant")


@dataclass(frozen=True, slots=True)
class Episode:
    """One played sample of a task. `task_hash` and `environment`, hashes, are "" if unknown."""

    env: str
    task_id: str
    task_index: int
    sample: int
    seed: int
    result: InteractionResult
    model: str = ""
    task_hash: str = ""
    expected_calls: list[dict[str, Any]] = field(default_factory=list)
    """The `name` and `arguments` of each call of the task's reference."""
    environment: str = ""


class Agent(Protocol):
    """An agent for the runner: any object with this method, as in slime's tau-bench example."""

    async def asolve(
        self,
        env: Any,
        rollout_args: Any,
        sampling_params: Mapping[str, Any],
        task_index: int | None = None,
        max_num_steps: int = 30,
        *,
        task: Task | None = None,
        seed: int = 0,
        session_id: str | None = None,
    ) -> InteractionResult:
        """Play one episode. Raise only `CancelledError`, `UsageError`, `EngineUnreachableError`."""
        ...
