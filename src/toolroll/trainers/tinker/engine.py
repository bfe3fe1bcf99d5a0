"""`TinkerEngine`: uses Tinker's `SamplingClient` as the engine of a `Model`. `to_datums` returns
the episode as Tinker's `Datum`s.

Invariants: a sampling parameter that Tinker does not have is refused, and the error names it. In a
`Datum`, position i has the target, the logprob and the advantage of token i + 1.
"""

from __future__ import annotations

import asyncio
import inspect
from importlib import import_module
from typing import Any

import numpy as np

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import GenerateRequest
from toolroll.trainers.advantages import per_token
from toolroll.trainers.framework_engine import FrameworkEngine, Sampled, renamed
from toolroll.trainers.sequences import TrainingSequence, select_sequences

NAMES = {
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    "stop_token_ids": "stop",
    **{name: name for name in ("temperature", "top_p", "top_k")},
}
"""Maps SGLang's name of a sampling parameter to Tinker's. Tinker's `stop` takes token ids or
strings, not both.
"""


class TinkerEngine(FrameworkEngine):
    """Tinker's `SamplingClient` as an `EngineClient`.

    A client samples with the weights that it was made for: assign the next one to `client`.
    `context_length` limits the prompt and the answer together, in tokens.
    """

    def __init__(self, client: Any, tokenizer: Any, *, context_length: int) -> None:
        super().__init__("Tinker", tokenizer, context_length=context_length)
        self.client = client

    async def sample(self, request: GenerateRequest) -> Sampled:
        """Sample one turn. Raise `UsageError` for what Tinker does not have."""
        params = renamed(request.sampling_params, NAMES, engine="the engine for Tinker")
        if request.extra:
            raise UsageError(f"Tinker has no {', '.join(request.extra)}: leave it out")
        tinker = import_module("tinker")
        future = self.client.sample(
            prompt=tinker.ModelInput.from_ints(request.input_ids.tolist()),
            num_samples=1,
            sampling_params=tinker.SamplingParams(**params),
        )
        # a concurrent.futures.Future before tinker 0.38
        answer = await (future if inspect.isawaitable(future) else asyncio.wrap_future(future))
        [turn] = answer.sequences
        return Sampled(turn.tokens, turn.logprobs, turn.stop_reason)


def to_datums(
    result: InteractionResult,
    advantage: float | None,
    *,
    loss_fn: str = "importance_sampling",
) -> list[Any]:
    """Return one `tinker.Datum` for each sequence of the episode that has trained tokens.

    Its `loss_fn_inputs` are those that `loss_fn` takes, all [tokens - 1]: `target_tokens`, and
    `logprobs` and `advantages`, or `weights` for "cross_entropy". Advantages and weights are
    `advantage` for trained tokens, and 0 for all others. An aborted episode has no `Datum`, so
    its advantage may be None. Raise `TokenError` if a trained token has no logprob.
    """
    return [
        _datum(sequence, advantage, with_logprobs=loss_fn != "cross_entropy")
        for sequence in select_sequences(result, several=True)
        if sequence.trained_tokens
    ]


def _datum(sequence: TrainingSequence, advantage: Any, *, with_logprobs: bool) -> Any:
    tinker = import_module("tinker")
    assert sequence.trajectory is not None
    ids = sequence.prompt_ids + sequence.response_ids
    values = per_token(sequence.trajectory, advantage)[1:]  # refuses None
    inputs: dict[str, Any] = {"target_tokens": np.array(ids[1:], dtype=np.int64)}
    if with_logprobs:
        logprobs = [0.0] * len(sequence.prompt_ids) + sequence.logprobs
        inputs |= {"logprobs": np.array(logprobs[1:], dtype=np.float32), "advantages": values}
    else:
        inputs["weights"] = values
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
