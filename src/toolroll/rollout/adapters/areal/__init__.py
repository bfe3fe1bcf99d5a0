"""AReaL: `ToolrollWorkflow`, a `RolloutWorkflow` to pass to `trainer.train`.

    workflow = ToolrollWorkflow(config.gconfig, tokenizer, EpisodeSettings(env="desk"))
    trainer.train(workflow=workflow)

Written for areal 1.0.4. In a row of the data set, the keys `index` and `metadata` name the task.
`toolroll tasks ENV` writes such rows.

- AReaL takes one sequence per episode. If an episode forked into several sequences, AReaL gets the
  one with the most trained tokens. The statistic `left_out_tokens` counts the trained tokens of the
  other sequences.
- If an episode was aborted, or has no reward or no trained token (for example because its first
  prompt is too long), the workflow raises an error. AReaL logs it, rejects the whole group and
  trains on another one. Without the whole group, its group normalization would be wrong.
- `versions` has the weight version of each sampled token, and -1 for all other tokens.
- `logprobs` are 0.0 for tokens that were not sampled.
"""

from toolroll.rollout.adapters.areal.workflow import ArealEngine, ToolrollWorkflow

__all__ = ["ArealEngine", "ToolrollWorkflow"]
