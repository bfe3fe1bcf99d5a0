"""TRL (1.16.0): `async_rollouts` for `AsyncGRPOTrainer`, and `make_rollout_func` for `GRPOTrainer`.

    parts = async_rollouts(
        config, EpisodeSettings(env="desk"), model=MODEL, prompts=["0"], weights="/dev/shm/weights"
    )
    AsyncGRPOTrainer(MODEL, args=config, train_dataset=..., **parts).train()

    rollout = make_rollout_func(EpisodeSettings(env="desk"), engine="http://127.0.0.1:30000")
    GRPOTrainer(model, reward_funcs=reward, rollout_func=rollout, train_dataset=...).train()

Rules of both:

- A prompt is a task's index, or a line of `toolroll tasks ENV`.
- `max_completion_length` limits each turn. With `GRPOTrainer`, it also limits the whole completion.
- TRL does not update the weights of SGLang servers. `async_rollouts` returns a weight transfer that
  does. For `GRPOTrainer`, the argument `sync_weights` of `make_rollout_func` is a function that
  does so, before the first rollout of each step.

Rules of `async_rollouts`:

- All sequences of an episode are trained, with the episode's advantage. A token is trained once.
- An aborted episode has no row. It is left out of its group's mean.
- Sampling parameters are `AsyncGRPOConfig`'s. Those that change what is sampled, but not the
  logprobs of TRL's loss, are refused.

Rules of `make_rollout_func`:

- TRL repeats each prompt once per completion that it wants, so each prompt of a call is one
  episode. Sampling parameters are `GRPOConfig`'s.
- `env_mask` is the loss mask. TRL trains the tokens with mask 1.
- If an episode forked, its sequence with the most trained tokens is the completion. The metric
  `toolroll/left_out_tokens` counts the trained tokens that are left out: those of the other
  sequences, and those after the limit.
- An aborted episode has a zero mask and the reward None. TRL leaves this reward out of the group's
  mean, and gives the episode the advantage 0.
- The weight versions of a completion are in the field `toolroll_weight_versions`, for reward
  functions. TRL itself does not read weight versions.

TRL is not imported. Its trainers and configs are passed in.
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
