"""`VllmEngine`: OpenRLHF's vLLM actor as the engine of a `Model`.

Invariants: the actor is called in the caller's event loop only; the trainer's sampling parameters
are copied for each call, never changed; a parameter that vLLM does not have is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from toolroll.rollout.adapters.framework_engine import to_vllm
from toolroll.rollout.engine import EngineClient, ModelInfo, Progress
from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.types import Completion, GenerateRequest, LogprobArray


class LlmEngine(Protocol):
    """The object that OpenRLHF 0.11 passes as `llm_engine`."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        """Return vLLM's `RequestOutput`."""
        ...


class VllmEngine(EngineClient):
    """OpenRLHF's vLLM actor as an `EngineClient`.

    `sampling_params`: the trainer's parameters (vLLM's `SamplingParams`), the defaults of a
    request. `max_length`: the limit of prompt and answer together, in tokens.
    """

    def __init__(
        self, llm_engine: LlmEngine, sampling_params: Any, *, max_length: int, vocab_size: int
    ) -> None:
        self._engine = llm_engine
        self._params = sampling_params
        self._model_info = ModelInfo(context_length=max_length, vocab_size=vocab_size)

    @property
    def url(self) -> str:
        """A name for messages, because there is no address."""
        return "openrlhf"

    async def model_info(self) -> ModelInfo:
        """Return the budget of one sample as the context length."""
        return self._model_info

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Return one turn.

        Raise `CompletionError` if a logprob is missing, `UsageError` for a sampling parameter that
        vLLM does not have.
        """
        params = self._sampling(request)
        began = perf_counter()
        answer = await self._engine.generate(
            request.input_ids.tolist(), params, multi_modal_data=None
        )
        output = answer.outputs[0]
        ids = np.array(output.token_ids, dtype=np.int32)
        stop = output.stop_reason
        reason = str(output.finish_reason)
        if reason == "stop" and stop is None and len(ids):
            stop = int(ids[-1])  # vLLM reports no reason for the end-of-sequence token itself
        if progress is not None:
            progress(ids.tolist())
        return Completion(
            output_ids=ids,
            logprobs=_logprobs(output.logprobs, ids),
            finish_reason=reason,
            matched=stop if reason == "stop" else None,
            text=str(output.text),
            prompt_tokens=len(request.input_ids),
            cached_tokens=int(answer.num_cached_tokens or 0),
            latency=perf_counter() - began,
            top_logprobs=_top_logprobs(
                output.logprobs, int(request.extra.get("top_logprobs_num") or 0)
            ),
        )

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Raise `UsageError`: there is no HTTP."""
        raise UsageError("OpenRLHF's engine has no HTTP address: call generate instead of post")

    async def aclose(self) -> None:
        """Do nothing: the trainer owns the engine."""

    def _sampling(self, request: GenerateRequest) -> Any:
        params = copy.deepcopy(self._params)
        given = to_vllm(request.sampling_params, name="OpenRLHF's vLLM engine")
        for name, value in given.items():
            setattr(params, name, value)
        params.n = 1
        # 0: only the logprob of the sampled token
        params.logprobs = max(params.logprobs or 0, int(request.extra.get("top_logprobs_num") or 0))
        return params


def _logprobs(given: Sequence[Mapping[int, Any]] | None, ids: np.ndarray[Any, Any]) -> LogprobArray:
    if given is None or len(given) != len(ids):
        raise CompletionError(f"vLLM gave {len(given or ())} logprobs for {len(ids)} sampled ids")
    values: list[float] = []
    for at, (index, place) in enumerate(zip(ids.tolist(), given, strict=True)):
        if index not in place:
            raise CompletionError(
                f"vLLM gave no logprob for the sampled token {index} at position {at}"
            )
        values.append(float(place[index].logprob))
    return np.array(values, dtype=np.float32)


def _top_logprobs(
    given: Sequence[Mapping[int, Any]], top: int
) -> tuple[tuple[tuple[float, int], ...], ...] | None:
    if not top:
        return None
    ranked = (
        sorted(((float(found.logprob), index) for index, found in place.items()), reverse=True)
        for place in given
    )
    return tuple(tuple(place[:top]) for place in ranked)
