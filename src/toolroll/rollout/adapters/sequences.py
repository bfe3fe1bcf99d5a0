"""`TrainingSequence`: one sequence of an episode as lists for a trainer, by these rules:

- Only tokens that an engine sampled are trained. Tokens made from text are refused.
- An aborted episode has no reward and no trained tokens (I9 in docs/guarantees.md).
- A response has at least one token, because trainers fail for an empty response. If nothing was
  sampled, the response is the prompt's last token, with mask 0.
- Tokens that were not sampled have the logprob 0.0. A trained token without a logprob is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolroll.rollout.errors import UsageError
from toolroll.rollout.session.trained_logprobs import check_trained_logprobs
from toolroll.rollout.types import InteractionResult, Status, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence for a trainer: `prompt_ids`, followed by `response_ids`.

    `loss_mask` and `logprobs` cover the response. `trajectory` is None if the episode ended before
    its first prompt.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    trajectory: Trajectory | None

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


def training_sequences(result: InteractionResult, *, filler: int = 0) -> list[TrainingSequence]:
    """Return the sequences of an episode: one sequence, or several if the episode forked.

    If the episode ended before its first prompt, its only sequence consists of the token id
    `filler`, which is not trained. Raise `UsageError` if the tokens were made from text, because no
    engine sampled them. Raise `TokenError` if a trained token has no logprob.
    """
    if any(trajectory.source != "engine" for trajectory in result.trajectories):
        raise UsageError(
            "an episode's tokens were made from a transcript: they cannot be trained on"
        )
    found: Sequence[Trajectory | None] = result.trajectories or [None]
    return [_sequence(trajectory, result.status, filler) for trajectory in found]


def most_trained(sequences: Sequence[TrainingSequence]) -> TrainingSequence:
    """Return the sequence with the most trained tokens. If several have the most, return the first.
    This is the rule for frameworks that take one sequence per sample.
    """
    return max(sequences, key=lambda sequence: sequence.trained_tokens)


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


@dataclass(frozen=True, slots=True)
class SingleSequence:
    """The one sequence that is trained, truncated to the framework's limit. `left_out_tokens`
    counts the trainable tokens that are left out: those of the other sequences if the episode
    forked, and those that the limit removes.
    """

    sequence: TrainingSequence
    left_out_tokens: int


def single_sequence(
    result: InteractionResult,
    *,
    filler: int = 0,
    max_response: int | None = None,
    max_prompt: int | None = None,
) -> SingleSequence:
    """Apply the limits to each sequence. Return the sequence that then has the most trained tokens.

    A response is truncated to `max_response` tokens. If a prompt has more than `max_prompt` tokens,
    no token of its sequence is trained. `filler` is the token id that stands for an episode that
    ended before its first prompt.
    """
    sequences = training_sequences(result, filler=filler)
    chosen = most_trained([_cut(one, max_response, max_prompt) for one in sequences])
    trained = sum(sequence.trained_tokens for sequence in sequences)
    return SingleSequence(chosen, trained - chosen.trained_tokens)


def _cut(
    sequence: TrainingSequence, max_response: int | None, max_prompt: int | None
) -> TrainingSequence:
    mask = sequence.loss_mask[:max_response]
    if max_prompt is not None and len(sequence.prompt_ids) > max_prompt:
        mask = [0] * len(mask)  # the model did not sample from the truncated prompt
    return TrainingSequence(
        sequence.prompt_ids,
        sequence.response_ids[:max_response],
        mask,
        sequence.logprobs[:max_response],
        sequence.trajectory,
    )
