"""The same trained tokens as one sequence or as two, and an aborted episode."""

from functools import partial
from typing import Any

import numpy as np

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.types import StopReason, Trajectory, Turn, WeightVersion

VOCAB = 32


def sequence(
    *turns: tuple[int, int, str | None], length: int, first_id: int = 0, **more: Any
) -> Trajectory:
    """A sequence of `length` tokens, with these turns: start, stop and why it is excluded."""
    ids = np.arange(first_id, first_id + length, dtype=np.int32) % VOCAB
    mask, logprobs = np.zeros(length, np.int32), np.full(length, np.nan, np.float32)
    for start, stop, excluded in turns:
        mask[start:stop] = excluded is None
        logprobs[start:stop] = -1.0
    made = tuple(Turn(start, stop, "stop", excluded=why) for start, stop, why in turns)
    first = next(start for start, _, why in turns if why != "context")
    return Trajectory(ids, mask, logprobs, made, first, **more)


def versioned(trajectory: Trajectory, *versions: str) -> Trajectory:
    """The trajectory, with these weight versions of its turns, separated by commas."""
    for turn, text in zip(trajectory.turns, versions, strict=True):
        spans = [WeightVersion(name, turn.start, turn.stop) for name in text.split(",")]
        object.__setattr__(turn, "weight_versions", tuple(spans))
    return trajectory


def result_of(reward: float | None, *sequences: Trajectory, **more: Any) -> InteractionResult:
    """The episode of these sequences. Without a reward, its environment failed."""
    stop = StopReason.ENVIRONMENT_ERROR if reward is None else StopReason.DONE
    given: dict[str, Any] = {"messages": [], "stop_reason": stop, "prompt": "", "info": {}}
    return InteractionResult.of(sequences, **{**given, "reward": reward, **more})


def episode(reward: float | None, *, forked: bool = False) -> InteractionResult:
    """The turns [4, 8) and [10, 16), in one sequence or in two: the same trained tokens. Episodes
    with other rewards have other tokens.
    """
    made = partial(sequence, first_id=0 if reward else 7)
    whole = (made((4, 8, None), (10, 16, None), length=16),)
    forks = (made((4, 8, None), length=8), made((4, 8, "context"), (10, 16, None), length=16))
    return result_of(reward, *(forks if forked else whole))
