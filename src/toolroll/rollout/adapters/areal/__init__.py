"""AReaL: `ToolrollWorkflow`, a `RolloutWorkflow` for `workflow=`.

    workflow = ToolrollWorkflow(config.gconfig, tokenizer, EpisodeSettings(env="desk"))
    trainer.train(workflow=workflow)

Written for areal 1.0.4. A row of the data set names its task by the keys `index` and `metadata`, as
`toolroll tasks ENV` writes them.

- Forks: AReaL takes one sequence for each episode, so it gets the one with the most trained tokens.
  The statistic `left_out_tokens` counts the trained tokens of the others.
- Aborted episodes are rejected (None), and AReaL then trains on another episode. Episodes without a
  sampled token, such as those whose first prompt is too long, are rejected too.
- `versions` has the weight version of each sampled token, and -1 for all others.
- `logprobs` are 0.0 for tokens that were not sampled.
"""

from toolroll.rollout.adapters.areal.engine import ArealEngine
from toolroll.rollout.adapters.areal.workflow import ToolrollWorkflow

__all__ = ["ArealEngine", "ToolrollWorkflow"]
