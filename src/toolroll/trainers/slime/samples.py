"""Convert an episode to slime's `Sample`s, or to those of miles, whose fields differ little. Each
training sequence becomes a copy of the sample that the trainer passed, so its `Sample` is not
imported. `keep_group` and `rollout_metrics` read groups of these samples.

Invariants: `loss_mask` and `rollout_log_probs` cover the response, and `tokens` covers the whole
sequence. A sequence that must not be trained (aborted, excluded by verification, nothing sampled)
has a zero mask and `remove_sample`. An aborted episode has no reward. `response_length` is at least
1. The samples of a forked episode share one `rollout_id`. `group_index` and `index` stay as they
are.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from toolroll.rollout.engine import LORA_PATH
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.template.cursor import KEPT
from toolroll.rollout.template.images import ImageTokens
from toolroll.rollout.types import Trajectory
from toolroll.trainers.sequences import (
    TrainingSequence,
    image_inputs,
    routed_experts,
    training_sequences,
)

KEY = "toolroll"
"""The key in `Sample.metadata` for the episode data that has no field in slime's `Sample`."""


class EpisodeSamples(list[Any]):
    """The samples of one episode as one item of a group: one sample, or several if it forked.

    slime and miles accept lists as items only if every item of the batch is a list, so an episode
    with one sample is a list too. But their data buffers and filters use an item as if it were a
    sample. So reading a field of this list reads it from the first sample, and setting a field sets
    it in every sample.
    """

    @property
    def index(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The first sample's index. Without this property, it would be the method `list.index`."""
        return self[0].index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # methods that `copy` and `pickle` look up
            raise AttributeError(name)
        return getattr(self[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        for sample in self:
            # The trainers set only zero masks (for tokens of earlier weights), with the length of
            # the first sample's response.
            mask = [0] * sample.response_length
            setattr(sample, name, mask if name == "loss_mask" else value)


def to_samples(
    sample: Any,
    result: InteractionResult,
    *,
    filler: int = 0,
    reward_key: str | None = None,
    experts_shape: tuple[int, int] | None = None,
    images: ImageTokens | None = None,
) -> list[Any]:
    """Return `result` as copies of `sample`, one per sequence, in the order of the sequences.

    `filler` is the token id that stands for an episode that ended before its first prompt. Raise
    `UsageError` if the tokens were made from text, because no engine sampled them. If
    `experts_shape` (layers, top_k) is given, the samples have routed experts: raise `TokenError` if
    the episode has none. If the episode has images, `images` must be given, and the samples have
    `multimodal_train_inputs`.
    """
    sequences = training_sequences(result, filler=filler, images=images is not None)
    samples = [_sequence_sample(sample, result, sequence, reward_key) for sequence in sequences]
    for sibling, sequence in zip(samples, sequences, strict=True):
        sibling.rollout_routed_experts = (
            None if experts_shape is None else routed_experts(sequence, experts_shape)
        )
        if images is not None:
            sibling.multimodal_train_inputs = image_inputs(sequence, images) or None
    if len(samples) > 1:
        rollout_id = sample.rollout_id if sample.rollout_id is not None else sample.index
        if rollout_id is None:
            raise UsageError(
                "an episode forked into several samples, but the original sample has neither "
                "rollout_id nor index: set one of them, so that the samples can share it"
            )
        for sibling in samples:
            sibling.rollout_id = rollout_id
    _add_episode_counts(samples[0], result)
    return samples


def _sequence_sample(
    sample: Any, result: InteractionResult, sequence: TrainingSequence, reward_key: str | None
) -> Any:
    copied = copy.copy(sample)
    copied.tokens = sequence.prompt_ids + sequence.response_ids
    copied.loss_mask, copied.rollout_log_probs = sequence.loss_mask, sequence.logprobs
    copied.response_length = len(sequence.response_ids)
    copied.response = result.response
    # An aborted sample has `remove_sample` from its earlier episode: do not keep it.
    removed = sample.remove_sample and sample.status is not type(sample).Status.ABORTED
    copied.remove_sample = bool(removed) or not sequence.trained_tokens
    copied.status = type(sample).Status[result.status.name]
    copied.reward = (
        {reward_key: result.reward} if reward_key and result.reward is not None else result.reward
    )
    copied.weight_versions = sequence.weight_versions
    copied.metadata = {**(sample.metadata or {}), KEY: _metadata(result, sequence.trajectory)}
    return copied


def _metadata(result: InteractionResult, trajectory: Trajectory | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "stop_reason": str(result.stop_reason),
        "metrics": dict(result.metrics),
        "step_rewards": list(result.step_rewards),
    }
    if "error" in result.info:
        metadata["error"] = result.info["error"]
    if trajectory is not None and trajectory.fork_reason is not None:
        metadata["fork_reason"] = trajectory.fork_reason
    turns = () if trajectory is None else trajectory.turns
    lora_paths = [turn.sampling_params.get(LORA_PATH) for turn in turns]
    if any(lora_paths):
        metadata["lora_paths"] = lora_paths
    return metadata


def _add_episode_counts(first: Any, result: InteractionResult) -> None:
    """Set the prefix cache counts and waiting times of the episode. Call this for the first
    sequence only, because slime adds these numbers up over samples.
    """
    metrics = result.metrics
    first.non_generation_time = max(
        0.0, metrics.get("seconds", 0.0) - metrics.get("engine_seconds", 0.0)
    )
    if "prefix_cache_info" not in vars(first):  # some versions of slime and miles do not have it
        return
    # copied, because the sample that was passed in has the same object
    info = first.prefix_cache_info = copy.copy(first.prefix_cache_info)
    info.cached_tokens += int(metrics.get("cached_tokens", 0))
    info.total_prompt_tokens += int(metrics.get("prompt_tokens", 0))


def aborted_metrics(sample: Any) -> Mapping[str, float] | None:
    """Return the metrics of the aborted episode of `sample`, or None if there is none."""
    earlier = (sample.metadata or {}).get(KEY)
    if earlier is None or sample.status is not type(sample).Status.ABORTED:
        return None
    metrics: Mapping[str, float] = earlier["metrics"]
    return metrics


def restarts(sample: Any, result: InteractionResult) -> float:
    """Return how often the episode of `sample` was played from the beginning again after an abort,
    including `result`, unless that was resumed.
    """
    earlier = aborted_metrics(sample)
    if earlier is None:
        return 0.0
    return float(earlier.get("restarts", 0.0)) + (not result.metrics.get("resumes"))


def is_parked(sample: Any) -> bool:
    """Return True if the episode of `sample`, which a player returned, was parked."""
    return bool(sample.metadata[KEY]["metrics"].get("parked"))


def failure(sample: Any) -> Any:
    """Return the error of the sample's episode, or its stop reason if it has no error."""
    summary = sample.metadata[KEY]
    return summary.get("error") or summary["stop_reason"]


def leaves(group: Iterable[Any]) -> Iterator[Any]:
    """Yield the samples of a group, including those in the list of a forked episode."""
    for item in group:
        if isinstance(item, list):
            yield from leaves(item)
        else:
            yield item


def has_aborted(group: Iterable[Any]) -> bool:
    """Return True if an episode of the group was aborted or has no reward."""
    return any(sample.reward is None or sample.status.name == "ABORTED" for sample in leaves(group))


def keep_group(args: Any, samples: Sequence[Any], **unused: Any) -> bool:
    """Return True if all episodes of the group have rewards, and the rewards differ. This function
    is for `--dynamic-sampling-filter-path`.

    slime's normalization fails if a reward is missing. If all rewards are equal, all advantages are
    0, so the group trains nothing.
    """
    if has_aborted(samples):
        return False
    rewards = {sample.get_reward_value(args) for sample in leaves(samples)}
    return len(rewards) > 1


_PER_EPISODE = (
    "turns invalid_calls lookalike_calls tool_calls tool_errors forks completion_tokens user_calls "
    "env_seconds resumes restarts worker_deaths"
).split()


def rollout_metrics(
    groups: Iterable[Sequence[Any]], *, prefix: str = "toolroll/"
) -> dict[str, float]:
    """Return means per episode, shares of episodes, and the `staleness` of weight versions. An item
    of a group is a sample, or a list of samples if the episode forked, which counts once. Aborted
    episodes are counted separately and are not included in means.
    """
    groups = [list(group) for group in groups]
    episodes = [item[0] if isinstance(item, list) else item for group in groups for item in group]
    graded = [sample for sample in episodes if sample.status.name != "ABORTED"]
    metrics = {"episodes": float(len(episodes)), "aborted": float(len(episodes) - len(graded))}
    numbers = [sample.metadata[KEY]["metrics"] for sample in graded]
    if numbers:
        totals: Counter[str] = Counter()
        for counts in numbers:
            totals.update(counts)
        metrics |= {name: totals[name] / len(graded) for name in _PER_EPISODE}
        prompts, cached = totals["prompt_tokens"], totals["cached_tokens"]
        metrics["cached_share"] = cached / prompts if prompts else 0.0
        kinds = {name: name.partition("token_mismatches/")[2] for name in totals}
        excluding = [name for name, kind in kinds.items() if kind and kind not in KEPT]
        metrics["token_mismatches"] = sum(totals[name] for name in excluding)
        truncated = [sample for sample in graded if sample.status.name == "TRUNCATED"]
        metrics["truncated_share"] = len(truncated) / len(graded)
    metrics |= staleness(sample for group in groups for sample in leaves(group))
    return {prefix + name: value for name, value in metrics.items()}


def staleness(samples: Iterable[Any]) -> dict[str, float]:
    """Return the mean and maximum staleness of the sampled spans, and the share of samples with
    several weight versions. The staleness of a span is the newest weight version in `samples` minus
    the span's version. Return an empty dict if no version is a number.
    """
    versions = [
        [int(version) for version in sample.weight_versions if str(version).isdigit()]
        for sample in samples
    ]
    every = list(chain.from_iterable(versions))
    if not every:
        return {}
    newest = max(every)
    return {
        "weight_version_staleness_mean": sum(newest - version for version in every) / len(every),
        "weight_version_staleness_max": float(newest - min(every)),
        "mixed_version_share": sum(len(set(mixed)) > 1 for mixed in versions) / len(versions),
    }
