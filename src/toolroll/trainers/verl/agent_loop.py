"""`ToolrollAgentLoop`: the class that verl instantiates for each sample.

verl creates a new object for every sample. So this module keeps the state that samples share (chat
template, tasks, user simulators), in one `EpisodePlayer` per event loop, server manager and
settings.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import Status
from toolroll.trainers.episodes import EpisodePlayer, PerLoop, task_index, why_aborted
from toolroll.trainers.sequences import (
    TrainingSequence,
    delivered_share,
    routed_experts,
    select_sequences,
)
from toolroll.trainers.verl.server_engine import ServerEngine, ServerManager
from toolroll.trainers.verl.settings import VerlSettings


def to_fields(
    result: InteractionResult,
    *,
    prompt_length: int,
    response_length: int,
    several: bool = False,
    filler: int = 0,
    experts_shape: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Return the fields of verl's `AgentLoopOutput` for each trained sequence of an episode, or for
    one of them if `several` is False. The field `metrics` is a dict here.

    `response_ids`, `response_mask` and `response_logprobs` have the same length, from 1 to
    `response_length` tokens. `prompt_ids` has at most `prompt_length` tokens. Every sample has the
    same keys in `reward_extra_info`, because verl reads only the first sample's keys.

    An episode that ended before its first prompt gets the token id `filler` as its prompt. If
    `experts_shape` (layers, top_k) is given, `routed_experts` is int16 [tokens - 1, layers, top_k].
    """
    sequences = select_sequences(
        result,
        several=several,
        filler=filler,
        max_response=response_length,
        max_prompt=prompt_length,
    )
    return [_sequence_fields(result, sequence, sequences, experts_shape) for sequence in sequences]


def _sequence_fields(
    result: InteractionResult,
    sequence: TrainingSequence,
    sequences: Sequence[TrainingSequence],
    experts_shape: tuple[int, int] | None,
) -> dict[str, Any]:
    experts = None
    if experts_shape is not None:
        experts = routed_experts(sequence, experts_shape).astype(np.int16)
    metrics = result.metrics
    return {
        "prompt_ids": sequence.prompt_ids,
        "response_ids": sequence.response_ids,
        "response_mask": sequence.loss_mask,
        "response_logprobs": sequence.logprobs,
        "routed_experts": experts,
        "reward_score": 0.0 if result.reward is None else result.reward,
        "num_turns": sum(message["role"] != "system" for message in result.messages),
        "metrics": {
            "generate_sequences": metrics.get("engine_seconds", 0.0),
            "tool_calls": metrics.get("env_seconds", 0.0),
        },
        "extra_fields": {
            "turn_scores": [],
            "tool_rewards": [],
            "toolroll_status": result.status.value,
            "toolroll_stop_reason": str(result.stop_reason),
            "toolroll_metrics": dict(metrics),
            "reward_extra_info": {
                "toolroll_aborted": float(result.status is Status.ABORTED),
                "toolroll_left_out_tokens": sequences[-1].left_out_tokens,
                "toolroll_delivered_share": delivered_share(sequences),
                "toolroll_turns": metrics.get("turns", 0.0),
            },
            **_global_steps(sequence.weight_versions),
        },
    }


def _global_steps(versions: Sequence[str]) -> dict[str, int]:
    """Return the first and the last training step whose weights were used for sampling, if verl
    reported steps.
    """
    steps = [int(step) for version in versions for step in version.split("-")]
    if not steps:
        return {}
    return {"min_global_steps": min(steps), "max_global_steps": max(steps)}


def counts_once(config: Any) -> bool:
    """Return True if verl counts an episode once, even if it has several sequences. `config` is
    verl's whole configuration.

    verl computes GRPO's advantages from the last sequence of each episode, but other estimators'
    from all sequences. With `seq-mean-token-mean`, each sequence weighs as much as an episode.
    """
    return bool(
        config.algorithm.adv_estimator == "grpo"
        and config.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-mean"
    )


HARMLESS = frozenset(
    "_target_ enable format max_assistant_turns num_repeat_rollouts tokenization_sanity_check_mode "
    "use_inference_chat_template".split()
)
"""The keys of verl's `multi_turn` that are honored, or have no effect on an episode."""
DEFAULTS = {
    "max_parallel_calls": 1,
    "max_tool_response_length": 256,
    "tool_response_truncate_side": "middle",
}
"""verl's defaults of the other keys. Those that are missing here are None."""


def _check_multi_turn(multi_turn: Mapping[str, Any]) -> None:
    for name, value in multi_turn.items():
        if name not in HARMLESS and value != DEFAULTS.get(name):
            raise UsageError(
                f"rollout.multi_turn.{name} is {value!r}, but episodes do not use it: leave it at "
                f"{DEFAULTS.get(name)!r}. The environment has the tools and the user, and the "
                "settings max_turns and parallel_calls limit an episode"
            )


_VERL = "verl.experimental.agent_loop.agent_loop"


_players: PerLoop[EpisodePlayer] = PerLoop()


class ToolrollAgentLoop:
    """Plays the task that a row's `extra_info` names. `settings` has the fields of `VerlSettings`.

    The other arguments are the same as for verl's `AgentLoopBase`. Raise `UsageError` if a setting
    is wrong. Create it in the event loop that runs it, as verl does.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: ServerManager,
        tokenizer: Any,
        data_config: Any,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.rollout_config = trainer_config.config.actor_rollout_ref.rollout
        self._model_config = trainer_config.config.actor_rollout_ref.model
        self._counts_once = counts_once(trainer_config.config)
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.settings = VerlSettings.read(settings or {}, where="settings of the agent loop")
        self._template_kwargs = data_config.config.get("apply_chat_template_kwargs") or {}
        # The player keeps a reference to the server manager, so its id is not reused.
        key = (id(server_manager), self.settings.model_dump_json())
        self.player = _players.get(key, self._make_player)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Play one episode and return it as verl's `AgentLoopOutput`. If verl counts a forked
        episode once (`counts_once`), return a list of them.

        `response_logprobs` is None unless verl requests logprobs (`rollout.calculate_log_probs`).
        Raise `RolloutError` for an aborted episode if `on_aborted` is "raise".
        """
        player = self.player
        info = _extra_info(row)
        index = task_index(info["index"])
        params = {"max_new_tokens": int(self.rollout_config.response_length), **sampling_params}
        with_logprobs = params.pop("logprobs", None)
        result = await player.play(
            index,
            params,
            metadata=info,
            number=player.next_number(index, info),
            session_id=uuid.uuid4().hex,
        )
        if result.status is Status.ABORTED and self.settings.on_aborted == "raise":
            raise RolloutError(f"the episode of task {index} was aborted: {why_aborted(result)}")
        # Only the worker of verl's trainer takes a list. It gives each run a session_id.
        several = self._counts_once and "session_id" in row
        verl, outputs = _verl(), []
        for fields in to_fields(
            result,
            prompt_length=int(self.rollout_config.prompt_length),
            response_length=int(self.rollout_config.response_length),
            several=several,
            filler=player.filler,
            experts_shape=self._experts_shape(cast(ServerEngine, player.model.engine)),
        ):
            if not with_logprobs:
                fields["response_logprobs"] = None
            fields["metrics"] = verl.AgentLoopMetrics(**fields["metrics"])
            outputs.append(verl.AgentLoopOutput(**fields))
        return outputs if several else outputs[0]

    def _experts_shape(self, engine: ServerEngine) -> tuple[int, int] | None:
        if not self.rollout_config.get("enable_rollout_routing_replay"):
            return None
        if engine.experts_shape is None:  # the engine has not answered yet
            engine.experts_shape = _model_experts(self._model_config)
        return engine.experts_shape

    def _make_player(self) -> EpisodePlayer:
        config = self.rollout_config
        multi_turn = config.get("multi_turn") or {}
        _check_multi_turn(multi_turn)
        turns = multi_turn.get("max_assistant_turns")
        length = int(config.prompt_length) + int(config.response_length)
        settings = self.settings.filled(
            max_turns=int(turns) if turns else None,
            chat_template_kwargs=dict(self._template_kwargs),
            context_length=config.get("max_model_len") or length,
        )
        engine = ServerEngine(
            self.server_manager,
            self.tokenizer,
            backend=str(config.name),
            context_length=int(settings.context_length or length),
        )
        model = Model.from_args(
            settings.rollout_args(), tokenizer=self.tokenizer, engine=lambda _: engine
        )
        return EpisodePlayer(model, settings)


def _model_experts(config: Any) -> tuple[int, int]:
    """Return (layers, top_k) of the routed experts of the model, as verl's servers read them.
    `config` is verl's `actor_rollout_ref.model`. Raise `UsageError` if the model has none.
    """
    model = importlib.import_module("verl.utils.config").omega_conf_to_dataclass(config).hf_config
    layers, top_k = (
        getattr(model, name, None) for name in ("num_hidden_layers", "num_experts_per_tok")
    )
    if not layers or not top_k:
        raise UsageError(
            "rollout.enable_rollout_routing_replay needs num_hidden_layers and "
            "num_experts_per_tok in the model's configuration: set it to false for a model "
            "without experts"
        )
    return int(layers), int(top_k)


def _extra_info(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row's `extra_info`, which names the row's task. A key that is missing or None is
    read from `extra_info.metadata`. (A Parquet file stores missing keys as None.)
    """
    info = row.get("extra_info") or {}
    metadata = info.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise UsageError(
            f"extra_info.metadata must be a mapping, with env and split, not {metadata!r:.60}"
        )
    merged = {**metadata, **{name: value for name, value in info.items() if value is not None}}
    index = merged.get("index", row.get("index"))
    if index is None:
        raise UsageError("a row needs extra_info.index, the task's index")
    return {**merged, "index": int(index)}


def _verl() -> Any:
    """Import verl's agent loop module and return it. Raise `UsageError` if it is not installed."""
    try:
        verl = importlib.import_module(_VERL)
    except ImportError as error:
        raise UsageError(
            f"ToolrollAgentLoop runs inside verl 0.9: pip install verl ({error})"
        ) from error
    verl.AgentLoopBase.register(ToolrollAgentLoop)
    return verl
