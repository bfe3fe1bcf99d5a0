"""Convert episodes to the dict that TRL takes from a `rollout_func`. `reward` is a function for
`reward_funcs` that reads this dict.

Invariants: all lists have one entry per prompt. In an entry, `completion_ids`, `logprobs` and
`env_mask` have the same length, which is at least one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolroll.rollout.adapters.single import single_sequence
from toolroll.rollout.types import InteractionResult, Status


def to_output(
    results: Sequence[InteractionResult], *, filler: int = 0, max_completion: int | None = None
) -> dict[str, list[Any]]:
    """Return `results` in the form that a `rollout_func` returns, with the extra fields
    `toolroll_*`.

    `filler` is the token id that stands for an episode that ended before its first prompt.
    """
    singles = [single_sequence(one, filler=filler, max_response=max_completion) for one in results]
    return {
        "prompt_ids": [one.sequence.prompt_ids for one in singles],
        "completion_ids": [one.sequence.response_ids for one in singles],
        "logprobs": [one.sequence.logprobs for one in singles],
        "env_mask": [one.sequence.loss_mask for one in singles],
        "toolroll_reward": [result.reward for result in results],
        "toolroll_status": [result.status.value for result in results],
        "toolroll_stop_reason": [str(result.stop_reason) for result in results],
        "toolroll_metrics": [dict(result.metrics) for result in results],
        "toolroll_left_out_tokens": [one.left_out_tokens for one in singles],
        "toolroll_weight_versions": [one.sequence.weight_versions for one in singles],
    }


def reward(
    completions: Sequence[Any],
    toolroll_reward: Sequence[float | None],
    toolroll_status: Sequence[str],
    toolroll_metrics: Sequence[dict[str, float]],
    toolroll_left_out_tokens: Sequence[int],
    log_metric: Callable[[str, float], None] | None = None,
    **others: Any,
) -> list[float | None]:
    """Return the episodes' rewards, with None for an aborted episode. This function is for
    `reward_funcs`.

    It also passes the share of aborted episodes, and the mean numbers of turns and of left-out
    tokens per episode, to TRL's `log_metric`.
    """
    if log_metric is not None:
        count = len(toolroll_status)
        aborted = sum(status == Status.ABORTED.value for status in toolroll_status)
        log_metric("toolroll/aborted_share", aborted / count)
        log_metric("toolroll/left_out_tokens", sum(toolroll_left_out_tokens) / count)
        log_metric("toolroll/turns", sum(one.get("turns", 0.0) for one in toolroll_metrics) / count)
    return list(toolroll_reward)
