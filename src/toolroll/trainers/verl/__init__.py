"""verl (0.9.1): `ToolrollAgentLoop`, an agent loop that you name in the file of
`actor_rollout_ref.rollout.agent.agent_loop_config_path`.

    - name: toolroll
      _target_: toolroll.trainers.verl.ToolrollAgentLoop
      settings: {env: desk}

Rules:

- A row's `extra_info` names the task: `index`, and optionally `env` and `split`.
- verl's own servers, SGLang or vLLM, sample the turns through verl's `server_manager`. All turns of
  an episode have the same request id, so verl routes them to the same server.
- With verl's trainer (`trainer.use_v1`, the default) and GRPO, the agent loop returns all
  sequences of a forked episode, unless `loss_agg_mode` is seq-mean-token-mean. Otherwise it returns
  the one with the most trained tokens. `toolroll_delivered_share` is the share of the trainable
  tokens that verl gets, and `toolroll_left_out_tokens` counts the others.
- A prompt has at most `prompt_length` tokens. The rest of it is the start of the response, with
  mask 0. The response is truncated to `response_length`.
- An aborted episode raises an error. verl's trainer (`trainer.use_v1`, the default) logs it and
  normalizes the rewards of the group without this episode. verl's legacy trainer ends its step.
  With `on_aborted: zero`, an aborted episode has a zero mask, the reward 0.0 and `toolroll_aborted`
  1. The mean reward of its group includes this 0.0, which shifts the advantages of the group.
- `min_global_steps` and `max_global_steps` are the first and the last training step whose weights
  sampled the sequence, if verl reports steps.

verl is imported only when the first episode has ended, to create verl's output type.
"""

from toolroll.trainers.verl.agent_loop import ToolrollAgentLoop, to_fields
from toolroll.trainers.verl.server_engine import ServerEngine
from toolroll.trainers.verl.settings import VerlSettings

__all__ = ["ServerEngine", "ToolrollAgentLoop", "VerlSettings", "to_fields"]
