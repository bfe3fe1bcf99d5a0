"""TRL's `GRPOTrainer` (1.16.0): a `rollout_func`.

    rollout = make_rollout_func(EpisodeSettings(env="desk"), engine="http://127.0.0.1:30000")
    trainer = GRPOTrainer(model, reward_funcs=reward, rollout_func=rollout, train_dataset=...)

Rules:

- A prompt is a task's index, or a line of `toolroll tasks ENV`. TRL repeats each prompt once per
  completion that it wants, so each prompt of a call is one episode.
- Sampling parameters are `GRPOConfig`'s. `max_completion_length` limits each turn, and the whole
  completion is truncated to that length.
- `env_mask` is the loss mask. TRL trains the tokens with mask 1.
- If an episode forked, its sequence with the most trained tokens is the completion. The metric
  `toolroll/left_out_tokens` counts the trained tokens that are left out: those of the other
  sequences, and those after the limit.
- An aborted episode has a zero mask and the reward None. TRL leaves this reward out of the group's
  mean, and gives the episode the advantage 0.
- TRL does not update the weights of SGLang servers. The argument `sync_weights` of
  `make_rollout_func` is a function that does so, before the first rollout of each step.
- The weight versions of a completion are in the field `toolroll_weight_versions`, for reward
  functions. TRL itself does not read weight versions.

TRL is not imported, because its trainer is passed in.
"""

from toolroll.trainers.trl.async_grpo import async_rollouts
from toolroll.trainers.trl.rollout_func import (
    RolloutFunc,
    make_rollout_func,
    reward,
    to_output,
)
from toolroll.trainers.trl.weights import weights_from_disk

__all__ = [
    "RolloutFunc",
    "async_rollouts",
    "make_rollout_func",
    "reward",
    "to_output",
    "weights_from_disk",
]
