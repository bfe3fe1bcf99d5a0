"""`SingleSequence`: the sequence of an episode to train on, for a framework that takes one sequence
of limited length per sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolroll.rollout.adapters.sequences import TrainingSequence, most_trained, training_sequences
from toolroll.rollout.types import InteractionResult


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
