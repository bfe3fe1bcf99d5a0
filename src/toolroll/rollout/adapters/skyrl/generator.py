"""`ToolrollGenerator`: a SkyRL `GeneratorInterface` that plays toolroll's episodes."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from toolroll.rollout.adapters.episodes import EpisodeSettings, gather, task_index
from toolroll.rollout.adapters.framework_engine import LoopPlayers, from_vllm
from toolroll.rollout.adapters.sequences import TrainingSequence
from toolroll.rollout.adapters.single import SingleSequence, single_sequence
from toolroll.rollout.adapters.skyrl.engine import SkyrlEngine
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import InteractionResult, Status

_STOP_REASONS = {Status.COMPLETED: "stop", Status.TRUNCATED: "length", Status.ABORTED: "abort"}
_NOT_SAMPLED = frozenset({"logprobs", "prompt_logprobs"})
_REFUSED = ("step_wise_trajectories", "merge_stepwise_output", "vision_language_generator")


@dataclass(frozen=True, slots=True)
class _Played:
    """One episode, and the one of its sequences that is trained."""

    result: InteractionResult
    single: SingleSequence

    @property
    def sequence(self) -> TrainingSequence:
        return self.single.sequence


class ToolrollGenerator:
    """Plays one episode for each prompt of a SkyRL batch.

    `generator_cfg` is SkyRL's `cfg.generator`. The generator reads its fields `sampling_params`,
    `max_turns` (unless `settings` sets it), `max_input_length`, `chat_template_kwargs`,
    `use_cache_salt`, `apply_overlong_filtering` and `zero_reward_on_non_stop`.

    `policy_model_name` is what SkyRL's `resolve_policy_model_name(cfg)` returns. If SkyRL trains a
    LoRA adapter, this is the adapter's name, and is required. Raise `UsageError` if it is missing,
    and for a setting of SkyRL that episodes do not support.

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
        for name in _REFUSED:
            if getattr(generator_cfg, name, False):
                raise UsageError(f"generator.{name} is not supported: set it to false")
        self._cfg = generator_cfg
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
                context_length=settings.context_length,
                vocab_size=len(tokenizer),
                cache_salt=bool(generator_cfg.use_cache_salt),
                model=policy_model_name or None,
            ),
            tokenizer,
            settings,
        )

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Play one episode per prompt. Return SkyRL's `GeneratorOutput`, in the order of the
        prompts.

        Raise `UsageError` if the settings or the tasks are not valid.
        """
        count = len(input_batch["prompts"])
        given = input_batch.get("sampling_params")
        params = self._default_params() if given is None else dict(given)
        limit = asyncio.Semaphore(self._limit)

        async def one(at: int) -> _Played:
            async with limit:
                return await self._play(input_batch, at, params)

        played = await gather(one(at) for at in range(count))
        return self._output(played, input_batch, with_logprobs=params.get("logprobs") is not None)

    async def aclose(self) -> None:
        """Close the models and user simulators that were opened in the running event loop."""
        await self._players.aclose()

    async def _play(self, batch: Mapping[str, Any], at: int, params: Mapping[str, Any]) -> _Played:
        extras = (batch.get("env_extras") or [{}] * (at + 1))[at] or {}
        ids = batch.get("trajectory_ids")
        player = self._players.get(self._client)
        result = await player.play(
            task_index(extras.get("index", _text(batch["prompts"][at]))),
            from_vllm(params, ignored=_NOT_SAMPLED),
            metadata=extras.get("metadata"),
            number=ids[at].repetition_id if ids else at,
        )
        filler = next(iter(player.model.template.stop_token_ids), 0)
        return _Played(result, single_sequence(result, filler=filler))

    def _default_params(self) -> dict[str, Any]:
        """Return `generator.sampling_params` under vLLM's names."""
        own = self._cfg.sampling_params
        names = "repetition_penalty temperature top_p min_p top_k logprobs stop".split()
        return {
            "max_tokens": own.max_generate_length,
            **{name: getattr(own, name) for name in names},
            **(own.additional_kwargs or {}),
        }

    def _output(
        self, played: Sequence[_Played], batch: Mapping[str, Any], *, with_logprobs: bool
    ) -> dict[str, Any]:
        ids = batch.get("trajectory_ids")
        reasons = [_STOP_REASONS[one.result.status] for one in played]
        given = [one.result.reward for one in played]
        if self._cfg.zero_reward_on_non_stop:  # before the means of the groups are taken
            given = [
                0.0 if reason == "length" else reward
                for reward, reason in zip(given, reasons, strict=True)
            ]
        rewards = _filled_rewards(
            given,
            [each.instance_id for each in ids] if ids else [str(at) for at in range(len(played))],
        )
        masks = [one.sequence.loss_mask for one in played]
        if self._cfg.apply_overlong_filtering:
            masks = [
                mask if reason == "stop" else [0] * len(mask)
                for mask, reason in zip(masks, reasons, strict=True)
            ]
        return {
            "prompt_token_ids": [one.sequence.prompt_ids for one in played],
            "response_ids": [one.sequence.response_ids for one in played],
            "rewards": [
                token_rewards(one.sequence, reward)
                for one, reward in zip(played, rewards, strict=True)
            ],
            "loss_masks": masks,
            "stop_reasons": reasons,
            "rollout_metrics": _metrics(played),
            "rollout_logprobs": [one.sequence.logprobs for one in played]
            if with_logprobs
            else None,
            "trajectory_ids": ids,
            "trajectory_generation_times": [
                one.result.metrics.get("seconds", 0.0) for one in played
            ],
            "rollout_expert_indices": None,
            "is_last_step": None,
            "env_metrics": [dict(one.result.metrics) for one in played],
            "pixel_values": None,
            "image_grid_thw": None,
        }


def _text(prompt: Any) -> Any:
    """Return the text of a prompt's last message. If a row has no column `index`, this text must be
    the task's index.
    """
    return prompt[-1]["content"] if isinstance(prompt, list) and prompt else prompt


def _filled_rewards(rewards: Sequence[float | None], instances: Sequence[str]) -> list[float]:
    """Replace each None in `rewards` with the mean reward of the same instance (SkyRL's name for a
    prompt), or with 0.0 if the instance has no reward.
    """
    graded: dict[str, list[float]] = {}
    for reward, instance in zip(rewards, instances, strict=True):
        if reward is not None:
            graded.setdefault(instance, []).append(reward)
    return [
        fmean(graded.get(instance, [0.0])) if reward is None else float(reward)
        for reward, instance in zip(rewards, instances, strict=True)
    ]


def token_rewards(sequence: TrainingSequence, reward: float) -> list[float]:
    """Return one reward for each token of the response. Their sum is `reward`.

    If the rewards of the trained turns add up to `reward`, the last token of each turn has the
    turn's reward. Otherwise (for example, if turns in another sequence of the episode have a part
    of `reward`), the last sampled token has the whole `reward`.
    """
    cut = len(sequence.prompt_ids)
    turns = sequence.trajectory.turns if sequence.trajectory is not None else ()
    trained = [turn for turn in turns if turn.excluded is None and turn.stop > cut]
    values = [0.0] * len(sequence.response_ids)
    given = [turn.reward for turn in trained]
    if math.isclose(math.fsum(given), reward, rel_tol=1e-9, abs_tol=1e-9):
        for turn in trained:
            values[turn.stop - cut - 1] += turn.reward
    else:
        values[trained[-1].stop - cut - 1 if trained else -1] = reward
    return values


def _metrics(played: Sequence[_Played]) -> dict[str, float]:
    lengths = [len(one.sequence.response_ids) for one in played] or [0]
    graded = [one.result for one in played if one.result.status is not Status.ABORTED]
    names = sorted({name for result in graded for name in result.metrics})
    return {
        "generate/min_num_tokens": float(min(lengths)),
        "generate/max_num_tokens": float(max(lengths)),
        "generate/avg_num_tokens": fmean(lengths),
        "toolroll/aborted": float(len(played) - len(graded)),
        "toolroll/left_out_tokens": float(sum(one.single.left_out_tokens for one in played)),
        **{
            f"toolroll/{name}": fmean(result.metrics.get(name, 0.0) for result in graded)
            for name in names
        },
    }


def _count_as_subclass() -> None:
    """Register `ToolrollGenerator` as a subclass of SkyRL's `GeneratorInterface`, if SkyRL is
    imported already.

    This function does not import SkyRL, because that would load torch and all of SkyRL's backends.
    """
    base = sys.modules.get("skyrl.train.generators.base")
    if base is not None:
        base.GeneratorInterface.register(ToolrollGenerator)
