"""`ToolrollGenerator`: a SkyRL `GeneratorInterface` that plays toolroll's episodes."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.types import GenerateRequest, Status, WeightVersion
from toolroll.trainers.episodes import EpisodeSettings, gather, task_index
from toolroll.trainers.framework_engine import (
    VLLM_NAMES,
    FrameworkEngine,
    LoopPlayers,
    Sampled,
    renamed,
)
from toolroll.trainers.sequences import (
    TrainingSequence,
    delivered_share,
    routed_experts,
    select_sequences,
)


class SkyrlEngine(FrameworkEngine):
    """SkyRL's inference engine client as an `EngineClient`.

    `client` is SkyRL's `InferenceEngineInterface`. If `cache_salt` is True and the client reports
    its weight version, a request never uses prefix cache entries of another version (like SkyRL's
    `use_cache_salt`). `model` is the engine's name for the policy's weights; None selects the
    engine's default.
    """

    def __init__(
        self,
        client: Any,
        tokenizer: Any,
        *,
        context_length: int | None,
        cache_salt: bool = True,
        model: str | None = None,
    ) -> None:
        super().__init__("SkyRL", tokenizer, context_length=context_length)
        self._client = client
        self._cache_salt = cache_salt
        self._model = {} if model is None else {"model": model}

    async def sample(self, request: GenerateRequest) -> Sampled:
        """Sample one turn. Raise `UsageError` for a sampling parameter that vLLM does not have."""
        params = renamed(request.sampling_params, VLLM_NAMES, engine="SkyRL's engine")
        before = self._version()
        batch: dict[str, Any] = {
            "prompts": None,
            "prompt_token_ids": [request.input_ids.tolist()],
            "sampling_params": {**params, "logprobs": 1},
            "session_ids": [request.session_id],
        }
        if self._cache_salt and before is not None:
            model = f"{self._model['model']}@" if self._model else ""
            batch["cache_salt"] = f"toolroll-{model}{before}"
        answer = await self._client.generate(batch, **self._model)
        ids = answer["response_ids"][0]
        logprobs, experts = answer.get("response_logprobs"), answer.get("rollout_expert_indices")
        versions: tuple[WeightVersion, ...] = ()
        if before is not None and before == self._version() and ids:
            versions = (WeightVersion(before, 0, len(ids)),)
        return Sampled(
            ids,
            logprobs[0] if logprobs else None,
            str(answer["stop_reasons"][0]),
            versions,
            routed_experts=experts[0] if experts else None,
        )

    def _version(self) -> str | None:
        """Return the engine's weight version, or None if the client does not report it."""
        version = getattr(self._client, "weight_version", None)
        return None if version is None else str(version)


_SKYRL_REASONS = {Status.COMPLETED: "stop", Status.TRUNCATED: "length", Status.ABORTED: "abort"}
_NOT_SAMPLED = frozenset({"logprobs", "prompt_logprobs"})
_SGLANG_NAMES = {vllm: sglang for sglang, vllm in VLLM_NAMES.items()}

_HONORED = frozenset(
    "sampling_params max_turns max_input_length chat_template_kwargs use_cache_salt "
    "inference_engine apply_overlong_filtering zero_reward_on_non_stop "
    "step_wise_trajectories".split()
)
# What SkyRL's trainer applies itself; and no end-of-sequence token is ever appended to a turn.
_HARMLESS = frozenset(
    "n_samples_per_prompt eval_sampling_params eval_n_samples_per_prompt merge_stepwise_output "
    "append_eos_token_after_stop_str_in_multi_turn".split()
)

Episodes = Sequence[tuple[InteractionResult, Sequence[TrainingSequence]]]
"""Episodes, and the sequences of each that are trained."""


class ToolrollGenerator:
    """Plays one episode for each prompt of a SkyRL batch.

    `generator_cfg` is SkyRL's `cfg.generator`. The generator reads its fields `sampling_params`,
    `max_turns` (unless `settings` sets it), `max_input_length`, `chat_template_kwargs`,
    `use_cache_salt`, `apply_overlong_filtering`, `zero_reward_on_non_stop`,
    `inference_engine.enable_return_routed_experts` and `step_wise_trajectories`. If the last one is
    True, all sequences of an episode are trained.

    `policy_model_name` is what SkyRL's `resolve_policy_model_name(cfg)` returns. If SkyRL trains a
    LoRA adapter, this is the adapter's name, and is required. Raise `UsageError` if it is missing,
    and for a field that is set to something that episodes do not support or that is unknown.

    Example:
        generator = ToolrollGenerator(
            cfg.generator,
            tokenizer,
            client,
            EpisodeSettings(env="desk"),
            policy_model_name=resolve_policy_model_name(cfg),
        )
        output = await generator.generate(batch)
    """

    def __init__(
        self,
        generator_cfg: Any,
        tokenizer: Any,
        inference_engine_client: Any,
        settings: EpisodeSettings,
        *,
        policy_model_name: str | None = None,
    ) -> None:
        _count_as_subclass()
        if not policy_model_name and getattr(
            inference_engine_client, "uses_lora_weight_sync", False
        ):
            raise UsageError(
                "SkyRL trains a LoRA adapter, and its engines need the adapter's name: pass "
                "policy_model_name=resolve_policy_model_name(cfg)"
            )
        _check_settings(generator_cfg)
        self._cfg = generator_cfg
        self._step_wise = bool(generator_cfg.step_wise_trajectories)
        self._client = inference_engine_client
        longest = generator_cfg.max_input_length
        settings = settings.filled(
            max_turns=generator_cfg.max_turns,
            chat_template_kwargs=generator_cfg.chat_template_kwargs,
            context_length=None
            if longest is None
            else longest + generator_cfg.sampling_params.max_generate_length,
            concurrency=256,  # SkyRL passes a whole batch at once
        )
        self._limit = settings.concurrency
        self._players = LoopPlayers(
            lambda client: SkyrlEngine(
                client,
                tokenizer,
                context_length=settings.context_length,
                cache_salt=bool(generator_cfg.use_cache_salt),
                model=policy_model_name or None,
            ),
            tokenizer,
            settings,
        )

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Play one episode per prompt. Return SkyRL's `GeneratorOutput`, in the order of the
        prompts.

        Raise `UsageError` if the settings or the tasks are not valid. Raise `RolloutError` if SkyRL
        asks for routed experts, and the engine has not returned any yet.
        """
        count = len(input_batch["prompts"])
        params = input_batch.get("sampling_params")
        params = self._default_params() if params is None else params
        limit = asyncio.Semaphore(self._limit)

        async def play(position: int) -> tuple[InteractionResult, Sequence[TrainingSequence]]:
            async with limit:
                return await self._play(input_batch, position, params)

        episodes = await gather(play(position) for position in range(count))
        return self._output(episodes, input_batch, with_logprobs=params.get("logprobs") is not None)

    async def aclose(self) -> None:
        """Close the models and user simulators that were opened in the running event loop."""
        await self._players.aclose()

    async def _play(
        self, batch: Mapping[str, Any], position: int, params: Mapping[str, Any]
    ) -> tuple[InteractionResult, Sequence[TrainingSequence]]:
        """Play the prompt at `position` in the batch."""
        rows = batch.get("env_extras")  # one row for each prompt; a row without columns is None
        extras = (rows[position] if rows else None) or {}
        ids = batch.get("trajectory_ids")
        requested = {
            name: value
            for name, value in params.items()
            if value is not None and name not in _NOT_SAMPLED
        }
        player = self._players.get(self._client)
        result = await player.play(
            task_index(extras.get("index", _text(batch["prompts"][position]))),
            renamed(requested, _SGLANG_NAMES, engine="toolroll"),
            metadata=extras.get("metadata"),
            number=ids[position].repetition_id if ids else position,
        )
        return result, select_sequences(result, several=self._step_wise, filler=player.filler)

    def _default_params(self) -> dict[str, Any]:
        """Return `generator.sampling_params` under vLLM's names."""
        params = dict(vars(self._cfg.sampling_params))
        more = params.pop("additional_kwargs") or {}
        return {"max_tokens": params.pop("max_generate_length"), **params, **more}

    def _output(
        self, episodes: Episodes, batch: Mapping[str, Any], *, with_logprobs: bool
    ) -> dict[str, Any]:
        results = [result for result, _ in episodes]
        ids = batch.get("trajectory_ids")
        if ids is None and self._step_wise:
            raise UsageError("generator.step_wise_trajectories needs trajectory_ids in the batch")
        reasons = [_SKYRL_REASONS[result.status] for result in results]
        graded = [result.reward for result in results]
        if self._cfg.zero_reward_on_non_stop:  # before the means of the groups are taken
            graded = [
                0.0 if reason == "length" else reward
                for reward, reason in zip(graded, reasons, strict=True)
            ]
        instances = [entry.instance_id for entry in ids] if ids else range(len(results))
        rewards, baseline_episodes = _rewards_and_baseline(graded, instances)
        rows = [
            (episode, sequence, sequence is episodes[episode][1][-1])
            for episode in (baseline_episodes if self._step_wise else range(len(results)))
            for sequence in episodes[episode][1]
        ]
        sequences = [sequence for _, sequence, _ in rows]
        only_stopped = self._cfg.apply_overlong_filtering
        logprobs = [sequence.logprobs for sequence in sequences]
        return {
            "prompt_token_ids": [sequence.prompt_ids for sequence in sequences],
            "response_ids": [sequence.response_ids for sequence in sequences],
            "rewards": [
                token_rewards(sequence, rewards[episode])
                if is_last  # SkyRL reads no other rewards of the episode
                else [0.0] * len(sequence.response_ids)
                for episode, sequence, is_last in rows
            ],
            "loss_masks": [
                [0] * len(sequence.loss_mask)
                if only_stopped and reasons[episode] != "stop"
                else sequence.loss_mask
                for episode, sequence, _ in rows
            ],
            "stop_reasons": [reasons[episode] for episode, _, _ in rows],
            "rollout_metrics": _metrics(episodes),
            "rollout_logprobs": logprobs if with_logprobs else None,
            "trajectory_ids": [ids[episode] for episode, _, _ in rows] if ids else None,
            "trajectory_generation_times": [
                results[episode].metrics.get("seconds", 0.0) for episode, _, _ in rows
            ],
            "rollout_expert_indices": self._experts(sequences),
            "is_last_step": [is_last for _, _, is_last in rows] if self._step_wise else None,
            "env_metrics": [dict(results[episode].metrics) for episode, _, _ in rows],
            "pixel_values": None,
            "image_grid_thw": None,
        }

    def _experts(self, sequences: Sequence[TrainingSequence]) -> list[Any] | None:
        """Return the routed experts [tokens - 1, layers, top_k], or None if SkyRL does not ask for
        them: as arrays for SkyRL 0.4, as lists for 0.3. Raise `RolloutError` if the engine has not
        returned any yet.
        """
        engines = getattr(self._cfg, "inference_engine", None)
        if not getattr(engines, "enable_return_routed_experts", False):
            return None
        engine: Any = self._players.get(self._client).model.engine
        shape = engine.experts_shape
        if shape is None:
            raise RolloutError(
                "SkyRL's engine has returned no routed experts, so their shape is not known: it "
                "has answered no request yet, or does not return them"
            )
        rows = [routed_experts(sequence, shape).astype(np.int16) for sequence in sequences]
        return rows if _takes_arrays() else [array.tolist() for array in rows]


def _check_settings(config: Any) -> None:
    """Raise `UsageError` for a setting that differs from SkyRL's default, unless it is honored or
    known to be harmless, and for what the engine would return beside routed experts.
    """
    default = type(config)()
    wrong = {
        f"generator.{name}": value
        for name, value in vars(config).items()
        if name not in _HONORED | _HARMLESS and value != getattr(default, name, None)
    }
    for name, value in vars(config.inference_engine).items():
        if value and name.startswith("enable_return_") and name != "enable_return_routed_experts":
            wrong[f"generator.inference_engine.{name}"] = value
    for name, value in wrong.items():
        raise UsageError(f"{name} is {value!r}, which is not supported: leave it at its default")


def _text(prompt: Any) -> Any:
    """Return the text of a prompt's last message. If a row has no column `index`, this text must be
    the task's index.
    """
    return prompt[-1]["content"] if isinstance(prompt, list) and prompt else prompt


def _rewards_and_baseline(
    rewards: Sequence[float | None], instances: Sequence[Any]
) -> tuple[list[float], list[int]]:
    """Return a reward for each episode, and the numbers of the episodes that may be in a baseline.

    An episode without a reward gets the mean of its instance (SkyRL's name for a prompt), or 0.0 if
    the instance has no reward. It is in the baseline only if the instance has fewer than two
    rewards, because SkyRL has no baseline for one episode.
    """
    graded: dict[Any, list[float]] = defaultdict(list)
    pairs = list(zip(rewards, instances, strict=True))
    for reward, instance in pairs:
        if reward is not None:
            graded[instance].append(float(reward))
    means = {instance: fmean(graded[instance] or [0.0]) for instance in instances}
    filled = [means[instance] if reward is None else float(reward) for reward, instance in pairs]
    return filled, [
        number
        for number, (reward, instance) in enumerate(pairs)
        if reward is not None or len(graded[instance]) < 2
    ]


def token_rewards(sequence: TrainingSequence, reward: float) -> list[float]:
    """Return one reward for each token of the response. Their sum is `reward`.

    If the rewards of the trained turns add up to `reward`, the last token of each turn has the
    turn's reward. Otherwise (for example, if turns in another sequence of the episode have a part
    of `reward`), the last sampled token has the whole `reward`.
    """
    cut = len(sequence.prompt_ids)
    turns = sequence.trajectory.turns if sequence.trajectory is not None else ()
    values = [0.0] * len(sequence.response_ids)
    end = cut + len(values)
    trained = [turn for turn in turns if turn.excluded is None and cut < turn.stop <= end]
    total = math.fsum(turn.reward for turn in trained)
    if math.isclose(total, reward, rel_tol=1e-9, abs_tol=1e-9):
        for turn in trained:
            values[turn.stop - cut - 1] += turn.reward
    else:
        values[trained[-1].stop - cut - 1 if trained else -1] = reward
    return values


def _metrics(episodes: Episodes) -> dict[str, float]:
    sequences = [sequence for _, trained in episodes for sequence in trained]
    lengths = [len(sequence.response_ids) for sequence in sequences] or [0]
    left_out = sum(sequence.left_out_tokens for sequence in sequences)
    graded = [result for result, _ in episodes if result.status is not Status.ABORTED]
    names = sorted({name for result in graded for name in result.metrics})
    return {
        "generate/min_num_tokens": float(min(lengths)),
        "generate/max_num_tokens": float(max(lengths)),
        "generate/avg_num_tokens": fmean(lengths),
        "toolroll/aborted": float(len(episodes) - len(graded)),
        "toolroll/left_out_tokens": float(left_out),
        "toolroll/delivered_share": delivered_share(sequences),
        **{
            f"toolroll/{name}": fmean(result.metrics.get(name, 0.0) for result in graded)
            for name in names
        },
    }


def _takes_arrays() -> bool:
    """Return True if SkyRL 0.4 or later is imported."""
    base = sys.modules.get("skyrl.train.generators.base")
    return base is not None and "rollout_sample_support" in base.GeneratorOutput.__annotations__


def _count_as_subclass() -> None:
    """Register `ToolrollGenerator` as a subclass of SkyRL's `GeneratorInterface`, if SkyRL is
    imported already.

    This function does not import SkyRL, because that would load torch and all of SkyRL's backends.
    """
    base = sys.modules.get("skyrl.train.generators.base")
    if base is not None:
        base.GeneratorInterface.register(ToolrollGenerator)
