"""Convert an episode to the fields of verl's `AgentLoopOutput`.

Invariants: `response_ids`, `response_mask` and `response_logprobs` have the same length, from 1 to
`response_length` tokens. `prompt_ids` has at most `prompt_length` tokens. Every sample has the same
keys in `reward_extra_info`, because verl reads only the first sample's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolroll.rollout.adapters.single import single_sequence
from toolroll.rollout.types import InteractionResult, Status


def to_fields(
    result: InteractionResult, *, prompt_length: int, response_length: int, filler: int = 0
) -> dict[str, Any]:
    """Return the fields of verl's `AgentLoopOutput`. The field `metrics` is a dict here.

    `filler` is the token id that stands for an episode that ended before its first prompt.
    """
    single = single_sequence(
        result, filler=filler, max_response=response_length, max_prompt=prompt_length
    )
    sequence = single.sequence
    metrics = result.metrics
    return {
        "prompt_ids": sequence.prompt_ids[-prompt_length:],
        "response_ids": sequence.response_ids,
        "response_mask": sequence.loss_mask,
        "response_logprobs": sequence.logprobs,
        "reward_score": 0.0 if result.reward is None else result.reward,
        "num_turns": sum(message["role"] != "system" for message in result.messages),
        "metrics": {
            "generate_sequences": metrics.get("engine_seconds", 0.0),
            "tool_calls": metrics.get("env_seconds", 0.0),
        },
        "extra_fields": {
            "turn_scores": [],
            "tool_rewards": [],
            "toolroll_status": result.status.value,
            "toolroll_stop_reason": str(result.stop_reason),
            "toolroll_metrics": dict(metrics),
            "reward_extra_info": {
                "toolroll_aborted": float(result.status is Status.ABORTED),
                "toolroll_left_out_tokens": single.left_out_tokens,
                "toolroll_turns": metrics.get("turns", 0.0),
            },
            **_steps(sequence.weight_versions),
        },
    }


def _steps(versions: Sequence[str]) -> dict[str, int]:
    """Return the first and the last training step whose weights were used for sampling, if verl
    reported steps.
    """
    steps = [int(step) for version in versions for step in version.split("-")]
    if not steps:
        return {}
    return {"min_global_steps": min(steps), "max_global_steps": max(steps)}
