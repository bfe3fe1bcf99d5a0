"""`ToolrollWorkflow`: an AReaL `RolloutWorkflow` that plays toolroll's episodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import Any

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import CompletionError, RolloutError, UsageError
from toolroll.rollout.types import GenerateRequest, WeightVersion
from toolroll.trainers.advantages import Baseline, group_advantages
from toolroll.trainers.episodes import EpisodeSettings, gather, task_index, why_aborted
from toolroll.trainers.framework_engine import (
    FrameworkEngine,
    LoopPlayers,
    Sampled,
    renamed,
)
from toolroll.trainers.sequences import (
    TrainingSequence,
    delivered_share,
    select_sequences,
)

NAMES = {
    name: name
    for name in (
        "max_new_tokens temperature top_p top_k stop stop_token_ids ignore_eos frequency_penalty"
    ).split()
}
"""The fields of `GenerationHyperparameters` that are set for each turn. SGLang's names are the
same.
"""


class ArealEngine(FrameworkEngine):
    """AReaL's inference engine as an `EngineClient`.

    `engine` is AReaL's `InferenceEngine`. `gconfig` is AReaL's `GenerationHyperparameters`.
    """

    def __init__(
        self, engine: Any, gconfig: Any, tokenizer: Any, *, context_length: int | None
    ) -> None:
        super().__init__("AReaL", tokenizer, context_length=context_length)
        self._engine = engine
        self._gconfig = gconfig
        self._tokenizer = tokenizer

    async def sample(self, request: GenerateRequest) -> Sampled:
        """Sample one turn. Raise `UsageError` for a sampling parameter that AReaL does not have.

        All turns of an episode have the same `rid`, so that AReaL sends them to the same server.
        """
        params = renamed(request.sampling_params, NAMES, engine="AReaL's engine")
        answer = await self._engine.agenerate(
            import_module("areal.api").ModelRequest(
                rid=request.session_id,
                input_ids=request.input_ids.tolist(),
                gconfig=self._gconfig.new(
                    n_samples=1, greedy=params.get("temperature") == 0, **params
                ),
                tokenizer=self._tokenizer,
            )
        )
        ids = list(answer.output_tokens)
        if len(answer.output_versions) != len(ids):
            raise CompletionError(
                f"AReaL's engine gave {len(answer.output_versions)} weight versions for "
                f"{len(ids)} sampled ids"
            )
        reason = "stop" if answer.stop_reason == "tool_calls" else str(answer.stop_reason)
        return Sampled(ids, list(answer.output_logprobs), reason, _spans(answer.output_versions))


def _spans(versions: Sequence[int]) -> tuple[WeightVersion, ...]:
    spans, start = [], 0
    for version, group in groupby(versions):
        stop = start + len(list(group))
        spans.append(WeightVersion(str(version), start, stop))
        start = stop
    return tuple(spans)


class ToolrollWorkflow:
    """Plays episodes for AReaL's trainer.

    `gconfig` is AReaL's `GenerationHyperparameters`. Its `max_new_tokens` limits one turn. The
    limit for the prompt and the response together is `settings.context_length`, or
    `gconfig.max_tokens` if that is not set.

    AReaL finds groups by counting rows, so that it can take only one sequence of an episode. If
    `group_size` is set, the workflow plays the whole group and returns all sequences. Their
    `rewards` are then the episodes' advantages, by `group_advantages` with `baseline` and
    `normalize`. Set AReaL's own `gconfig.n_samples` to 1 and `actor.reward_norm` to null.

    AReaL's actor computes `(reward + reward_bias) * reward_scaling`. With `group_size`, pass the
    actor's two values: `rewards` are then such that it computes the advantages.

    Raise `UsageError` if `gconfig.use_beam_search` or `gconfig.min_new_tokens` is set, if both
    groups are set, if `reward_scaling` is 0, or if one of the actor's values is passed without
    `group_size`.

    Example:
        workflow = ToolrollWorkflow(
            config.gconfig, tokenizer, EpisodeSettings(env="desk"), group_size=8
        )
        tensors = await workflow.arun_episode(engine, {"index": 0})
    """

    def __init__(
        self,
        gconfig: Any,
        tokenizer: Any,
        settings: EpisodeSettings,
        *,
        group_size: int | None = None,
        baseline: Baseline = "mean",
        normalize: bool = True,
        reward_scaling: float = 1.0,
        reward_bias: float = 0.0,
    ) -> None:
        _register()
        if gconfig.use_beam_search:
            raise UsageError("gconfig.use_beam_search is not supported: set it to false")
        if gconfig.min_new_tokens:
            raise UsageError(
                "gconfig.min_new_tokens is not supported, because AReaL does not send it to the "
                "engine: set it to 0"
            )
        if group_size is not None and gconfig.n_samples != 1:
            raise UsageError(
                f"gconfig.n_samples={gconfig.n_samples} and group_size={group_size} are both set: "
                "the workflow plays the group, so set gconfig.n_samples to 1 and actor.reward_norm "
                "to null"
            )
        if group_size is None and (reward_scaling, reward_bias) != (1.0, 0.0):
            raise UsageError(
                "reward_scaling and reward_bias need group_size: without it, AReaL gets rewards, "
                "which its actor moves and scales"
            )
        if not reward_scaling:
            raise UsageError(
                "reward_scaling is 0: AReaL's actor multiplies all rewards by it, so that nothing "
                "is trained. Set actor.reward_scaling to another value, and pass it"
            )
        self._scaling, self._bias = reward_scaling, reward_bias
        self._group_size = group_size
        self._advantages = partial(group_advantages, baseline=baseline, normalize=normalize)
        settings = settings.filled(context_length=gconfig.max_tokens)
        room = settings.context_length
        self._params = _sampling_params(gconfig)
        self._players = LoopPlayers(
            lambda engine: ArealEngine(engine, gconfig, tokenizer, context_length=room),
            tokenizer,
            settings,
        )

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, Any]:
        """Play the task `data["index"]` on `engine`.

        Return a dict of tensors with these types and shapes, for k sequences of up to n tokens:
        `input_ids`, `loss_mask` and `versions`: int32 [k, n]; `logprobs`: float32 [k, n];
        `attention_mask`: bool [k, n]; `rewards`: float32 [k]. Without `group_size`, k is 1.

        Raise `RolloutError` if the episode was aborted, or has no reward or no trained token: AReaL
        then rejects the whole group. With `group_size`, raise it only if this is so for the whole
        group. Raise `UsageError` if the settings or the task are not valid.
        """
        if "index" not in data:
            raise UsageError(
                "a row has no key 'index': write the tasks with `toolroll tasks ENV`, and keep "
                "all columns"
            )
        index, metadata = task_index(data["index"]), data.get("metadata") or {}
        player = self._players.get(engine)
        results = await gather(
            player.play(
                index,
                self._params,
                metadata=metadata,
                number=player.next_number(index, metadata),
            )
            for _ in range(self._group_size or 1)
        )
        rows = self._rows(results)
        if not rows:
            # With None, AReaL would keep the rest of the group. Its normalization finds groups by
            # counting rows, so this and all later groups would get each other's rewards.
            aborted = results[-1].reward is None
            raise RolloutError(
                f"the episode of task {index} cannot be trained on, so AReaL rejects its group: "
                f"{why_aborted(results[-1]) if aborted else 'it has no trained token'}"
            )
        return _tensors(rows)

    def _rows(self, results: Sequence[InteractionResult]) -> list[tuple[TrainingSequence, float]]:
        """Return the sequences to train, and the value of each for `rewards`."""
        rows = []
        grouped = self._group_size is not None
        values = self._advantages(results) if grouped else [result.reward for result in results]
        for result, value in zip(results, values, strict=True):
            sequences = select_sequences(result, several=grouped)
            if value is None or not sequences[0].trained_tokens:
                continue
            _record(
                reward=result.reward or 0.0,
                num_turns=result.metrics.get("turns", 0.0),
                left_out_tokens=sequences[-1].left_out_tokens,
                delivered_share=delivered_share(sequences),
            )
            value = value / self._scaling - self._bias
            rows += [(sequence, value) for sequence in sequences]
        return rows

    async def aclose(self) -> None:
        """Close the models and user simulators that were opened in the running event loop."""
        await self._players.aclose()


def _sampling_params(gconfig: Any) -> dict[str, Any]:
    params = {name: getattr(gconfig, name) for name in NAMES}
    if gconfig.greedy:
        params["temperature"] = 0.0
    return {name: value for name, value in params.items() if value is not None}


def _record(**values: float) -> None:
    """Add `values` to the statistics that AReaL keeps for the running workflow."""
    scope = import_module("areal").workflow_context.stat_scope()
    import_module("areal.utils.stats_tracker").get(scope).scalar(**values)


def _tensors(rows: Sequence[tuple[TrainingSequence, float]]) -> dict[str, Any]:
    torch = import_module("torch")
    tensors = [_row(torch, sequence) for sequence, _ in rows]
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in tensors], batch_first=True)
        for name in tensors[0]
    }
    rewards = torch.tensor([value for _, value in rows], dtype=torch.float32)
    return {**padded, "rewards": rewards}


def _row(torch: Any, sequence: TrainingSequence) -> dict[str, Any]:
    assert sequence.trajectory is not None
    ids = sequence.prompt_ids + sequence.response_ids
    before = len(sequence.prompt_ids)
    versions = [-1] * len(sequence.trajectory)
    for span in sequence.trajectory.weight_versions:
        versions[span.start : span.stop] = [int(span.version)] * (span.stop - span.start)
    return {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "logprobs": torch.tensor([0.0] * before + sequence.logprobs, dtype=torch.float32),
        "loss_mask": torch.tensor([0] * before + sequence.loss_mask, dtype=torch.int32),
        "versions": torch.tensor(versions[: len(ids)], dtype=torch.int32),
        "attention_mask": torch.ones(len(ids), dtype=torch.bool),
    }


def _register() -> None:
    """Make the workflow a subclass of AReaL's `RolloutWorkflow`, which AReaL requires. AReaL itself
    is not imported: that takes seconds, and configures the logging.
    """
    if api := sys.modules.get("areal.api.workflow_api"):
        api.RolloutWorkflow.register(ToolrollWorkflow)


_register()  # AReaL imports a workflow by its path, and then asks for the class
