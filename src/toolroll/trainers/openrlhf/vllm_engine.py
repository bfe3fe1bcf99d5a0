"""`VllmEngine`: uses OpenRLHF's vLLM actor as the engine of a `Model`.

Invariants: the actor is called only in the caller's event loop. The trainer's sampling parameters
are copied for each call and never changed. A parameter that vLLM does not have is refused, and the
error names it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from toolroll.rollout.errors import CompletionError
from toolroll.rollout.types import GenerateRequest
from toolroll.trainers.framework_engine import VLLM_NAMES, FrameworkEngine, Sampled, renamed


class LlmEngine(Protocol):
    """The object that OpenRLHF 0.11 passes as `llm_engine`."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        """Return vLLM's `RequestOutput`."""
        ...


class VllmEngine(FrameworkEngine):
    """OpenRLHF's vLLM actor as an `EngineClient`.

    `sampling_params`: the trainer's parameters (vLLM's `SamplingParams`), which are the defaults of
    each request. `max_length`: the limit of the prompt and the answer together, in tokens.
    """

    def __init__(
        self, llm_engine: LlmEngine, tokenizer: Any, sampling_params: Any, *, max_length: int
    ) -> None:
        super().__init__("OpenRLHF", tokenizer, context_length=max_length)
        self._engine = llm_engine
        self._params = sampling_params

    async def sample(self, request: GenerateRequest) -> Sampled:
        """Sample one turn.

        Raise `CompletionError` if a logprob is missing, and `UsageError` for a sampling parameter
        that vLLM does not have.
        """
        answer = await self._engine.generate(
            request.input_ids.tolist(), self._sampling(request), multi_modal_data=None
        )
        output = answer.outputs[0]
        return Sampled(
            output.token_ids,
            _logprobs(output.logprobs, output.token_ids),
            str(output.finish_reason),
            matched=output.stop_reason,  # None for the end-of-sequence token itself
            text=str(output.text),
            cached_tokens=int(answer.num_cached_tokens or 0),
            top_logprobs=_top_logprobs(
                output.logprobs, int(request.extra.get("top_logprobs_num") or 0)
            ),
        )

    def _sampling(self, request: GenerateRequest) -> Any:
        params = copy.deepcopy(self._params)
        overrides = renamed(request.sampling_params, VLLM_NAMES, engine="OpenRLHF's vLLM engine")
        for name, value in overrides.items():
            setattr(params, name, value)
        params.n = 1
        # 0: only the logprob of the sampled token
        params.logprobs = max(params.logprobs or 0, int(request.extra.get("top_logprobs_num") or 0))
        return params


def _logprobs(places: Sequence[Mapping[int, Any]] | None, ids: Sequence[int]) -> list[float]:
    if places is None or len(places) != len(ids):
        raise CompletionError(f"vLLM gave {len(places or ())} logprobs for {len(ids)} sampled ids")
    values: list[float] = []
    for position, (index, logprobs) in enumerate(zip(ids, places, strict=True)):
        if index not in logprobs:
            raise CompletionError(
                f"vLLM gave no logprob for the sampled token {index} at position {position}"
            )
        values.append(float(logprobs[index].logprob))
    return values


def _top_logprobs(
    places: Sequence[Mapping[int, Any]], top: int
) -> tuple[tuple[tuple[float, int], ...], ...] | None:
    if not top:
        return None
    ranked = (
        sorted(((float(entry.logprob), index) for index, entry in entries.items()), reverse=True)
        for entries in places
    )
    return tuple(tuple(pairs[:top]) for pairs in ranked)
