"""OpenRLHF's `llm_engine` (vLLM's output objects) on top of the embedded engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from support.standins import recorded_class, stands_for
from support.wire import generate, sglang_names

SamplingParams = recorded_class(
    "vllm.sampling_params:SamplingParams",
    "n temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed "
    "stop stop_token_ids ignore_eos max_tokens min_tokens logprobs",
)
"""As far as OpenRLHF sets it."""
Logprob = recorded_class("vllm.logprobs:Logprob")
CompletionOutput = recorded_class("vllm.outputs:CompletionOutput")


def asked_params(**given: Any) -> Any:
    """The parameters that OpenRLHF's trainer asks for."""
    return SamplingParams(**{"top_k": -1, "max_tokens": None, "logprobs": 1, **given})


@stands_for("vllm.outputs:RequestOutput", own="__init__")
@dataclass
class RequestOutput:
    outputs: list[Any]
    num_cached_tokens: int | None = None


@stands_for(
    "openrlhf.trainer.ray.vllm_engine:RolloutRayActor",
    own="__init__ url without_logprobs seen loops",
)
@dataclass
class LlmEngine:
    """`without_logprobs`: as an engine that gives none. `loops`: the event loops that it was
    called in.
    """

    url: str
    without_logprobs: bool = False
    seen: list[Any] = field(default_factory=list)
    loops: set[int] = field(default_factory=set)

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        self.seen.append(sampling_params)
        self.loops.add(id(asyncio.get_running_loop()))
        given = {
            name: value
            for name, value in vars(sampling_params).items()
            if value is not None and name not in ("n", "logprobs", "seed")
        }
        sampled = await generate(self.url, prompt_token_ids, sglang_names(given))
        pairs = zip(sampled.output_ids, sampled.logprobs, strict=True)
        matched = sampled.meta["finish_reason"].get("matched")
        eos = isinstance(matched, int)  # vLLM reports no reason for the end-of-sequence token
        logprobs = [{index: Logprob(value)} for index, value in pairs]
        output = CompletionOutput(
            index=0,
            text=sampled.body["text"],
            token_ids=sampled.output_ids,
            cumulative_logprob=None,
            logprobs=None if self.without_logprobs else logprobs,
            finish_reason=sampled.reason,
            stop_reason=None if eos else matched,
        )
        return RequestOutput([output], sampled.meta["cached_tokens"])


@stands_for("vllm.v1.engine.async_llm:AsyncLLM", own="__init__")
class AsyncLLM:
    """The engine that OpenRLHF's actor calls, with `engine` behind it."""

    def __init__(self, engine: LlmEngine) -> None:
        self._engine = engine

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        yield await self._engine.generate(prompt["prompt_token_ids"], sampling_params)
