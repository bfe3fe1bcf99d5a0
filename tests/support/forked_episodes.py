"""The same trained tokens as one sequence or as two, and an aborted episode."""

from __future__ import annotations

from functools import partial

import numpy as np

from toolroll.rollout.types import InteractionResult, StopReason, Trajectory, Turn

VOCAB = 32


def sequence(*turns: tuple[int, int, str | None], length: int, first_id: int = 0) -> Trajectory:
    """A sequence of `length` tokens, with these turns: start, stop and why it is excluded."""
    ids = np.arange(first_id, first_id + length, dtype=np.int32) % VOCAB
    mask, logprobs = np.zeros(length, np.int32), np.full(length, np.nan, np.float32)
    for start, stop, excluded in turns:
        mask[start:stop] = excluded is None
        logprobs[start:stop] = -1.0
    made = tuple(Turn(start, stop, "stop", excluded=why) for start, stop, why in turns)
    first = next(start for start, _, why in turns if why != "context")
    return Trajectory(ids, mask, logprobs, made, first)


def episode(reward: float | None, *, forked: bool = False) -> InteractionResult:
    """The turns [4, 8) and [10, 16), in one sequence or in two: the same trained tokens. Episodes
    with other rewards have other tokens.
    """
    made = partial(sequence, first_id=0 if reward else 7)
    whole = (made((4, 8, None), (10, 16, None), length=16),)
    forks = (made((4, 8, None), length=8), made((4, 8, "context"), (10, 16, None), length=16))
    stop = StopReason.ENVIRONMENT_ERROR if reward is None else StopReason.DONE
    return InteractionResult.of(
        forks if forked else whole, messages=[], stop_reason=stop, prompt="", info={}, reward=reward
    )
