"""AReaL: `ToolrollWorkflow`, a `RolloutWorkflow` to pass to `trainer.train`.

    settings = EpisodeSettings(env="desk")
    workflow = ToolrollWorkflow(config.gconfig, tokenizer, settings, group_size=8)
    trainer.train(workflow=workflow)

Written for areal 1.0.4. In a row of the data set, the keys `index` and `metadata` name the task.
`toolroll tasks ENV` writes such rows.

- With `group_size`, the workflow plays the group, returns all sequences of its episodes, and their
  advantages as `rewards`. Aborted episodes are left out. Set `gconfig.n_samples` to 1 and
  `actor.reward_norm` to null, and pass the actor's `reward_scaling` and `reward_bias`.
- Without it, AReaL plays the group. It normalizes rewards over a fixed number of rows, so it gets
  only the sequence with the most trained tokens of each episode. If an episode was aborted, or has
  no reward or no trained token (for example because its first prompt is too long), the workflow
  raises an error. AReaL logs it, rejects the whole group and trains on another one.
- The statistic `delivered_share` is the share of the trainable tokens that AReaL gets, and
  `left_out_tokens` counts the others.
- `versions` has the weight version of each sampled token, and -1 for all other tokens.
- `logprobs` are 0.0 for tokens that were not sampled.
"""

from toolroll.trainers.areal.workflow import ArealEngine, ToolrollWorkflow

__all__ = ["ArealEngine", "ToolrollWorkflow"]
