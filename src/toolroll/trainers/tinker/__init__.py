"""Tinker: an engine over `SamplingClient`, `Datum`s to train on, and tinker-cookbook's `Env`.

    engine = TinkerEngine(sampling_client, tokenizer, context_length=32768)
    model = Model.from_args(settings.rollout_args(), tokenizer=tokenizer, engine=lambda _: engine)
    result = await EpisodePlayer(model, settings).play(0, {"max_new_tokens": 512})
    data = to_datums(result, advantage)

Written for tinker 0.25.0 with tinker-cookbook 0.5.4, and 0.38.0 with 0.6.1.

- `to_datums` returns one `Datum` for each sequence of an episode, so that a forked episode is
  trained completely. An aborted episode has none. The loss is a sum over tokens, so an episode
  counts once.
- For tinker-cookbook's own training loop, pass `ToolrollGroup`, an `EnvGroupBuilder`.
  tinker-cookbook samples the tokens and makes its own `Datum`s. It has no place for an episode that
  must not be trained, so the environment raises `RolloutError` for an aborted or excluded one.
- Tinker aborts no turn, so there is nothing to resume. It has no sessions of its cache, and reports
  no weight versions.
- Penalties, `min_p`, stop strings (with the template's stop tokens, Tinker takes no others) and
  further fields of a request are refused before the first token.
"""

from toolroll.trainers.tinker.engine import TinkerEngine, to_datums
from toolroll.trainers.tinker.environment import ToolrollEnv, ToolrollGroup

__all__ = ["TinkerEngine", "ToolrollEnv", "ToolrollGroup", "to_datums"]
