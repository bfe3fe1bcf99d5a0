"""SkyRL: `ToolrollGenerator`, to return from `BasePPOExp.get_generator`.

    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return ToolrollGenerator(
            cfg.generator,
            tokenizer,
            inference_engine_client,
            EpisodeSettings(env="desk"),
            policy_model_name=resolve_policy_model_name(cfg),
        )

`resolve_policy_model_name` is SkyRL's, in `skyrl.backends.skyrl_train.inference_servers.utils`.
Written for skyrl 0.3.0. In a row of the data set, the columns `index` and `metadata` name the task.
`toolroll tasks ENV` writes such rows. With these columns, `prompt` may contain anything that SkyRL
accepts. `env_class` is not read.

- With `generator.step_wise_trajectories=true`, all sequences of a forked episode are rows of one
  trajectory, and the last row has the reward. Without it, SkyRL gets the one with the most trained
  tokens. `rollout_metrics["toolroll/delivered_share"]` is the share of the trainable tokens that
  SkyRL gets.
- With `step_wise_trajectories`, aborted episodes are left out, if two episodes of the prompt have
  rewards. Otherwise they have the stop reason "abort" and a zero loss mask. SkyRL requires a number
  as their reward, and includes it in the group's baseline. So this number is the mean reward of
  the prompt's graded samples in the batch, or 0.0 if no sample is graded.
- An episode without a sampled token has a zero mask, for example if its first prompt is too long.
- Rewards are given per token. If the environment's step rewards add up to the episode's reward,
  each step reward is at the last token of its turn. Otherwise the episode's reward is at the last
  sampled token.
- SkyRL's output has no field for weight versions.
"""

from toolroll.trainers.skyrl.generator import SkyrlEngine, ToolrollGenerator

__all__ = ["SkyrlEngine", "ToolrollGenerator"]
