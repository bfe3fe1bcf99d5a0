"""`Row`: what `AsyncGRPOTrainer` trains on. `group_rows`: the rows of a group of episodes.

Invariants: each sampled token that can be trained is in one row, with mask 1. In other rows that
contain it, it has mask 0. All rows of an episode have its advantage. A row's version is that of its
oldest trained turn, not of the turns before a fork that it only repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Trajectory
from toolroll.trainers.advantages import group_advantages
from toolroll.trainers.sequences import TrainingSequence, select_sequences


@dataclass(slots=True)
class Row:
    """One sequence, with the fields of TRL's `RolloutSample`. The arrays are int64, int64 and
    float32, with one value per token. TRL reads `completion` only for its traces.
    """

    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    completion: list[Any]
    prompt: list[Any] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    enqueued_at: float | None = None


def group_rows(results: Sequence[InteractionResult], group_id: int) -> list[Row]:
    """Return the rows of a group's episodes. An aborted episode has none. The advantages are GRPO's
    (`group_advantages` with `normalize`), as in TRL's own worker.

    Raise `UsageError` if a weight version is not a number, because TRL compares it with its own.
    """
    advantages = group_advantages(results, normalize=True)
    return [
        _row(sequence, sequence.trajectory, advantage, group_id, result)
        for result, advantage in zip(results, advantages, strict=True)
        for sequence in select_sequences(result, several=True)
        if advantage is not None and sequence.trajectory is not None and sequence.trained_tokens
    ]


def _row(
    sequence: TrainingSequence,
    trajectory: Trajectory,
    advantage: float,
    group_id: int,
    result: InteractionResult,
) -> Row:
    before = len(sequence.prompt_ids)
    return Row(
        np.array(sequence.prompt_ids + sequence.response_ids, np.int64),
        np.array([0] * before + sequence.loss_mask, np.int64),
        np.array([0.0] * before + sequence.logprobs, np.float32),
        advantage,
        _oldest_version(trajectory),
        group_id,
        result.messages,
    )


def _oldest_version(trajectory: Trajectory) -> int:
    versions = [
        span.version
        for turn in trajectory.turns
        if turn.excluded is None
        for span in turn.weight_versions
    ]
    try:
        return min(map(int, versions))
    except ValueError:
        raise UsageError(
            f"the engine's weight versions must be numbers, not {versions or 'missing'}: only the "
            "trainer may load weights into it, and a router must forward weight_version"
        ) from None
