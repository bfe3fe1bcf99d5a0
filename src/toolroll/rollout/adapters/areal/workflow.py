"""`ToolrollWorkflow`: an AReaL `RolloutWorkflow` that plays toolroll's episodes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import Any

from toolroll.rollout.adapters.episodes import EpisodeSettings, task_index, why_aborted
from toolroll.rollout.adapters.framework_engine import (
    FrameworkEngine,
    LoopPlayers,
    Sampled,
    renamed,
)
from toolroll.rollout.adapters.sequences import TrainingSequence, single_sequence
from toolroll.rollout.errors import CompletionError, RolloutError, UsageError
from toolroll.rollout.types import GenerateRequest, Status, WeightVersion

NAMES = {
    name: name
    for name in (
        "max_new_tokens min_new_tokens temperature top_p top_k stop stop_token_ids ignore_eos "
        "frequency_penalty"
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
        super().__init__("AReaL", context_length=context_length, vocab_size=len(tokenizer))
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
    `gconfig.max_tokens` if that is not set. Raise `UsageError` if `gconfig.use_beam_search` is
    True.

    Example:
        workflow = ToolrollWorkflow(config.gconfig, tokenizer, EpisodeSettings(env="desk"))
        tensors = await workflow.arun_episode(engine, {"index": 0})
    """

    def __init__(
        self,
        gconfig: Any,
        tokenizer: Any,
        settings: EpisodeSettings,
    ) -> None:
        if gconfig.use_beam_search:
            raise UsageError("gconfig.use_beam_search is not supported: set it to false")
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

        Return a dict of tensors with these types and shapes: `input_ids`, `loss_mask` and
        `versions`: int32 [1, n]; `logprobs`: float32 [1, n]; `attention_mask`: bool [1, n];
        `rewards`: float32 [1]. Raise `RolloutError` if the episode was aborted, or has no reward or
        no trained token: AReaL then rejects the whole group. Raise `UsageError` if the settings or
        the task are not valid.
        """
        if "index" not in data:
            raise UsageError(
                "a row has no key 'index': write the tasks with `toolroll tasks ENV`, and keep "
                "all columns"
            )
        index, metadata = task_index(data["index"]), data.get("metadata") or {}
        player = self._players.get(engine)
        number = player.next_number(index, metadata)
        result = await player.play(index, self._params, metadata=metadata, number=number)
        sequence = single_sequence(result)
        reward = None if result.status is Status.ABORTED else result.reward
        if reward is None or not sequence.trained_tokens:
            # With None, AReaL would keep the rest of the group. Its normalization finds groups by
            # counting rows, so this and all later groups would get each other's rewards.
            raise RolloutError(
                f"the episode of task {index} cannot be trained on, so AReaL rejects its group: "
                f"{why_aborted(result) if reward is None else 'it has no trained token'}"
            )
        _record(
            reward=reward,
            num_turns=result.metrics.get("turns", 0.0),
            left_out_tokens=sequence.left_out_tokens,
        )
        return _tensors(sequence, reward)

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
    scope = importlib.import_module("areal.workflow_context").stat_scope()
    importlib.import_module("areal.utils.stats_tracker").get(scope).scalar(**values)


def _tensors(sequence: TrainingSequence, reward: float) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    assert sequence.trajectory is not None
    ids = sequence.prompt_ids + sequence.response_ids
    before = len(sequence.prompt_ids)
    versions = [-1] * len(ids)
    for span in sequence.trajectory.weight_versions:
        versions[span.start : span.stop] = [int(span.version)] * (span.stop - span.start)
    rows = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "logprobs": torch.tensor([0.0] * before + sequence.logprobs, dtype=torch.float32),
        "loss_mask": torch.tensor([0] * before + sequence.loss_mask, dtype=torch.int32),
        "versions": torch.tensor(versions, dtype=torch.int32),
        "rewards": torch.tensor(reward, dtype=torch.float32),
        "attention_mask": torch.ones(len(ids), dtype=torch.bool),
    }
    return {name: row.unsqueeze(0) for name, row in rows.items()}


# AReaL requires a subclass of its own class, but is installed only in a trainer
with contextlib.suppress(ImportError):
    importlib.import_module("areal.api.workflow_api").RolloutWorkflow.register(ToolrollWorkflow)
