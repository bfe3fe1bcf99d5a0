"""`TrainingSequence`: one sequence of an episode as lists for a trainer, by these rules:

- Only tokens that an engine sampled are trained. Tokens made from text are refused.
- An aborted episode has no reward and no trained tokens (I9 in docs/guarantees.md).
- A response has at least one token, because trainers fail for an empty response. If nothing was
  sampled, the response is the prompt's last token, with mask 0.
- Tokens that were not sampled have the logprob 0.0. A trained token without a logprob is refused.
"""

from __future__ import annotations

import base64
import io
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import TokenError, UsageError
from toolroll.rollout.session.session import check_trained_logprobs
from toolroll.rollout.template.images import ImageTokens
from toolroll.rollout.types import Status, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence for a trainer: `prompt_ids`, followed by `response_ids`.

    `loss_mask` and `logprobs` cover the response. `trajectory` is None if the episode ended before
    its first prompt. `left_out_tokens` counts the episode's trainable tokens that are left out (see
    `select_sequences`): those of other sequences, and those that a limit removes.
    """

    prompt_ids: list[int] = field(repr=False)
    response_ids: list[int] = field(repr=False)
    loss_mask: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    trajectory: Trajectory | None
    left_out_tokens: int = 0

    @property
    def trained_tokens(self) -> int:
        """The number of tokens with loss mask 1."""
        return sum(self.loss_mask)

    @property
    def weight_versions(self) -> list[str]:
        """The weight version of each span in `Trajectory.weight_versions`, in order. If the
        sequence was truncated, spans after its last token are left out.
        """
        if self.trajectory is None:
            return []
        end = len(self.prompt_ids) + len(self.response_ids)
        return [span.version for span in self.trajectory.weight_versions if span.start < end]


def training_sequences(
    result: InteractionResult, *, filler: int = 0, images: bool = False
) -> list[TrainingSequence]:
    """Return the sequences of an episode: one sequence, or several if the episode forked.

    If the episode ended before its first prompt, its only sequence consists of the token id
    `filler`, which is not trained. Raise `UsageError` if the tokens were made from text, because no
    engine sampled them, or if they have images and `images` is False: the trainer takes none. Raise
    `TokenError` if a trained token has no logprob.
    """
    if any(trajectory.media for trajectory in result.trajectories) and not images:
        raise UsageError("an episode has images, and this trainer takes none")
    if any(trajectory.source != "engine" for trajectory in result.trajectories):
        raise UsageError(
            "an episode's tokens were made from a transcript: they cannot be trained on"
        )
    trajectories: Sequence[Trajectory | None] = result.trajectories or [None]
    return [_sequence(trajectory, result.status, filler) for trajectory in trajectories]


def select_sequences(
    result: InteractionResult,
    *,
    several: bool,
    filler: int = 0,
    max_response: int | None = None,
    max_prompt: int | None = None,
) -> list[TrainingSequence]:
    """Return the sequences of an episode that have trained tokens within the limits, in order. If
    there are none, return the first sequence. If `several` is False, return only the sequence with
    the most trained tokens, for a trainer that takes one sequence per sample.

    A prompt has at most `max_prompt` tokens: the rest of it is moved to the response, with mask 0.
    A response is truncated to `max_response` tokens, and ends with its last trained token, because
    trainers put the reward there. `left_out_tokens` of the last sequence counts
    all trainable tokens that are left out. `filler` is as in `training_sequences`.
    """
    sequences = training_sequences(result, filler=filler)
    within = [_limited(sequence, max_response, max_prompt) for sequence in sequences]
    chosen = [sequence for sequence in within if sequence.trained_tokens] or within[:1]
    if not several:
        chosen = [max(chosen, key=lambda sequence: sequence.trained_tokens)]
    trained = sum(sequence.trained_tokens for sequence in sequences)
    left_out = trained - sum(sequence.trained_tokens for sequence in chosen)
    if left_out and len(sequences) > 1:
        warn_of_left_out(left_out, trained)
    return [*chosen[:-1], replace(chosen[-1], left_out_tokens=left_out)]


def delivered_share(sequences: Iterable[TrainingSequence]) -> float:
    """Return which share of its episodes' trainable tokens the trainer gets, or 1.0 if there are
    none. `sequences` come from `select_sequences`.
    """
    sequences = list(sequences)
    delivered = sum(sequence.trained_tokens for sequence in sequences)
    return share_of(delivered, sum(sequence.left_out_tokens for sequence in sequences))


def share_of(delivered: int, left_out: int) -> float:
    """Return the share of `delivered` in both counts of tokens, or 1.0 if both are 0."""
    total = delivered + left_out
    return delivered / total if total else 1.0


_calls = count()
"""Counts the calls of `warn_of_left_out`."""


def warn_of_left_out(left_out: int, trained: int) -> None:
    """Warn that `left_out` of the `trained` tokens of a forked episode are in sequences that the
    trainer does not take. Only the first call in a process warns.
    """
    if next(_calls):
        return
    logger.warning(
        "an episode forked into several sequences, and the trainer does not take all of them: "
        "%d of its %d trainable tokens (%.0f %%) are left out. `toolroll check-template` says "
        "which `history` setting prevents this",
        left_out,
        trained,
        100 * left_out / trained,
    )


def routed_experts(sequence: TrainingSequence, shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    """Return the routed experts of the sequence's tokens except the last, [n - 1, layers, top_k].
    `shape` is (layers, top_k).

    A sequence without trained tokens may have none, but trainers need rows for all sequences: then
    each row has the experts 0 to top_k - 1. Raise `UsageError` if the rows do not have `shape`, and
    `TokenError` if a sequence with trained tokens has none.
    """
    length, trajectory = len(sequence.prompt_ids) + len(sequence.response_ids), sequence.trajectory
    rows = None if trajectory is None else trajectory.routed_experts
    if rows is None and sequence.trained_tokens:
        raise TokenError(
            "a trained sequence has no routed experts: the engine must return those of each turn"
        )
    if rows is None:
        return np.tile(np.arange(shape[1], dtype=np.int32), (length - 1, shape[0], 1))
    if rows.shape[1] != math.prod(shape):
        raise UsageError(
            f"the engine returns {rows.shape[1]} experts per token, but the trainer's model has "
            f"{shape[0]} layers with {shape[1]} experts per token each"
        )
    return rows[: length - 1].astype(np.int32).reshape(length - 1, *shape)


def image_inputs(sequence: TrainingSequence, images: ImageTokens) -> dict[str, Any]:
    """Return what the model's processor makes of the sequence's images, as torch tensors:
    `pixel_values`, and for Qwen `image_grid_thw`. Return {} if there are none.

    Raise `UsageError` if the images were not kept, and `TokenError` if the processor gives them
    other numbers of tokens than in the episode.
    """
    media = sequence.trajectory.media if sequence.trajectory is not None else ()
    if not media:
        return {}
    if not all(image.url for image in media):
        raise UsageError("the images of an episode that was read from a file are not kept with it")
    from PIL import Image

    files = [base64.b64decode(image.url.partition(",")[2]) for image in media]
    pictures = [Image.open(io.BytesIO(data)) for data in files]
    inputs = dict(images.processor.image_processor(pictures, return_tensors="pt"))
    patches = getattr(images.processor.image_processor, "merge_size", 1) ** 2  # of one token
    counts = [int(grid.prod()) // patches for grid in inputs.get("image_grid_thw", ())]
    if counts and counts != [image.count for image in media]:
        raise TokenError(f"the processor gives the images {counts} tokens, not the episode's")
    return inputs


def _limited(
    sequence: TrainingSequence, max_response: int | None, max_prompt: int | None
) -> TrainingSequence:
    cut = len(sequence.prompt_ids) if max_prompt is None else max_prompt
    moved = sequence.prompt_ids[cut:]
    mask = [*([0] * len(moved)), *sequence.loss_mask][:max_response]
    stop = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)
    return replace(
        sequence,
        prompt_ids=sequence.prompt_ids[:cut],
        response_ids=[*moved, *sequence.response_ids][:stop],
        loss_mask=mask[:stop],
        logprobs=[*([0.0] * len(moved)), *sequence.logprobs][:stop],
    )


def _sequence(trajectory: Trajectory | None, status: Status, filler: int) -> TrainingSequence:
    if trajectory is None or len(trajectory) < 2:
        return TrainingSequence([filler], [filler], [0], [0.0], None)
    cut = min(trajectory.prompt_length, len(trajectory) - 1)
    ids, mask = trajectory.input_ids.tolist(), trajectory.loss_mask[cut:]
    if status is not Status.ABORTED:
        check_trained_logprobs(trajectory.logprobs[cut:], mask)
    logprobs = np.nan_to_num(trajectory.logprobs[cut:], nan=0.0)
    return TrainingSequence(
        ids[:cut],
        ids[cut:],
        [0] * len(mask) if status is Status.ABORTED else mask.tolist(),
        logprobs.astype(float).tolist(),
        trajectory,
    )
