"""`SingleSequence`: an episode for a framework that takes one sequence of limited length per
sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolroll.rollout.adapters.sequences import TrainingSequence, most_trained, training_sequences
from toolroll.rollout.types import InteractionResult


@dataclass(frozen=True, slots=True)
class SingleSequence:
    """The one sequence that is trained, truncated to the framework's limit. `left_out_tokens`
    counts the trained tokens that are left out: those of the other sequences if the episode forked,
    and those after the limit.
    """

    sequence: TrainingSequence
    left_out_tokens: int
    weight_versions: list[str]


def single_sequence(
    result: InteractionResult, *, filler: int = 0, max_response: int | None = None
) -> SingleSequence:
    """Return the sequence with the most trained tokens, truncated to `max_response` response
    tokens.

    The sequence is chosen before it is truncated. `filler` is the token id that is used if the
    episode ended before its first prompt.
    """
    sequences = training_sequences(result, filler=filler)
    chosen = most_trained(sequences)
    cut = TrainingSequence(
        chosen.prompt_ids,
        chosen.response_ids[:max_response],
        chosen.loss_mask[:max_response],
        chosen.logprobs[:max_response],
        chosen.trajectory,
    )
    trained = sum(sequence.trained_tokens for sequence in sequences)
    return SingleSequence(cut, trained - cut.trained_tokens, _versions(cut))


def _versions(sequence: TrainingSequence) -> list[str]:
    """Return the weight version of each span that begins before the truncation."""
    if sequence.trajectory is None:
        return []
    end = len(sequence.prompt_ids) + len(sequence.response_ids)
    return [span.version for span in sequence.trajectory.weight_versions if span.start < end]
