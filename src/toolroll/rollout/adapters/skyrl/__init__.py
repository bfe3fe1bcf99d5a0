"""SkyRL: `ToolrollGenerator`, to return from `BasePPOExp.get_generator`.

    def get_generator(self, cfg, tokenizer, inference_engine_client):
        settings = EpisodeSettings(env="desk")
        return ToolrollGenerator(cfg.generator, tokenizer, inference_engine_client, settings)

Written for skyrl 0.3.0. A row of the data set names its task by the columns `index` and `metadata`,
as `toolroll tasks ENV` writes them; `prompt` may hold anything that SkyRL accepts, and `env_class`
is not read.

- Forks: SkyRL takes one sequence for each prompt, so it gets the one with the most trained tokens.
  `rollout_metrics["toolroll/left_out_tokens"]` counts the trained tokens of the others.
- Aborted episodes have the stop reason "abort" and a zero loss mask. SkyRL requires a number as
  their reward and counts it in the group's baseline. So their reward is the mean of the prompt's
  graded samples in the batch, which does not change the baseline (0.0 if no sample is graded).
- An episode without a sampled token has a zero mask, for example if its first prompt is too long.
- Rewards are given per token. If the environment's step rewards add up to the episode's reward,
  each is at the last token of its turn. Otherwise the reward is at the last sampled token.
- The weight version of a turn is recorded with the episode if it did not change during the turn.
  SkyRL has no field for weight versions.
"""

from toolroll.rollout.adapters.skyrl.engine import SkyrlEngine
from toolroll.rollout.adapters.skyrl.generator import ToolrollGenerator

__all__ = ["SkyrlEngine", "ToolrollGenerator"]
