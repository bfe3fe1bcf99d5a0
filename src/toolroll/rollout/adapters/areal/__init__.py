"""AReaL: `ToolrollWorkflow`, a `RolloutWorkflow` for `workflow=`.

    workflow = ToolrollWorkflow(config.gconfig, tokenizer, EpisodeSettings(env="desk"))
    trainer.train(workflow=workflow)

Written for areal 1.0.4. In a row of the data set, the keys `index` and `metadata` name the task.
`toolroll tasks ENV` writes such rows.

- Forks: AReaL takes one sequence per episode, so it gets the sequence with the most trained tokens.
  The statistic `left_out_tokens` counts the trained tokens of the other sequences.
- Aborted episodes are rejected (None), and AReaL then trains on another episode. Episodes without a
  sampled token, such as those whose first prompt is too long, are rejected too.
- `versions` has the weight version of each sampled token, and -1 for all other tokens.
- `logprobs` are 0.0 for tokens that were not sampled.
"""

from toolroll.rollout.adapters.areal.engine import ArealEngine
from toolroll.rollout.adapters.areal.workflow import ToolrollWorkflow

__all__ = ["ArealEngine", "ToolrollWorkflow"]
