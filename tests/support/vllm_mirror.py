"""OpenRLHF's `llm_engine` (vLLM's output objects) on top of the embedded engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


@dataclass
class SamplingParams:
    """vLLM's, as far as OpenRLHF sets it."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = 0


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None


@dataclass
class LlmEngine:
    """`without_logprobs`: as an engine that gives none. `loops`: the event loops that it was
    called in.
    """

    url: str
    http: aiohttp.ClientSession
    without_logprobs: bool = False
    seen: list[SamplingParams] = field(default_factory=list)
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
        params = {_NAMES.get(name, name): value for name, value in given.items()}
        body = {
            "input_ids": list(prompt_token_ids),
            "sampling_params": params,
            "return_logprob": True,
        }
        async with self.http.post(f"{self.url}/generate", json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        meta, ids = answer["meta_info"], answer["output_ids"]
        logprobs = [{index: Logprob(value)} for value, index, _ in meta["output_token_logprobs"]]
        matched = meta["finish_reason"].get("matched")
        eos = isinstance(matched, int)  # vLLM reports no reason for the end-of-sequence token
        output = CompletionOutput(
            ids,
            answer["text"],
            meta["finish_reason"]["type"],
            None if eos else matched,
            None if self.without_logprobs else logprobs,
        )
        return RequestOutput([output], meta["cached_tokens"])
