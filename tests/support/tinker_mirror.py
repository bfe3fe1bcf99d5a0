"""Doubles of tinker 0.38.0: a `SamplingClient` that samples from the embedded engine, a
`TrainingClient` that trains a small network, and the types that the adapter uses. `install` puts
them in place of tinker. Without it, the clients use the types of the installed package.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import aiohttp
import numpy as np
import pytest
from support.standins import stand_in, stands_for


@stands_for("tinker:EncodedTextChunk")
@dataclass
class EncodedTextChunk:
    tokens: list[int]


@stands_for("tinker:ModelInput")
@dataclass
class ModelInput:
    chunks: list[Any]

    @classmethod
    def from_ints(cls, tokens: list[int]) -> ModelInput:
        return cls(chunks=[EncodedTextChunk(tokens)])

    def to_ints(self) -> list[int]:
        return [one for chunk in self.chunks for one in chunk.tokens]


@stands_for("tinker:SamplingParams")
@dataclass
class SamplingParams:
    max_tokens: int | None = None
    seed: int | None = None
    stop: Any = None
    temperature: float = 1
    top_k: int = -1
    top_p: float = 1


@stands_for("tinker:Datum")
@dataclass
class Datum:
    """It keeps its inputs as they are."""

    model_input: Any
    loss_fn_inputs: dict[str, Any] = field(default_factory=dict)


@stands_for("tinker:SampledSequence")
@dataclass
class SampledSequence:
    stop_reason: str
    sequence_id: str
    tokens_np: Any = None
    logprobs_np: Any = None

    @property
    def tokens(self) -> list[int]:
        return list(self.tokens_np.tolist())

    @property
    def logprobs(self) -> list[float] | None:
        return None if self.logprobs_np is None else list(self.logprobs_np.tolist())


@stands_for("tinker:SampleResponse")
@dataclass
class SampleResponse:
    sequences: list[Any]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this module's types in place of tinker's."""
    types = ModelInput, SamplingParams, Datum, SampledSequence, SampleResponse
    stand_in(monkeypatch, {"tinker": {one.__name__: one for one in types}})


def is_old() -> bool:
    """Whether the tinker in use is 0.25, whose futures cannot be awaited."""
    return getattr(import_module("tinker"), "__version__", "").startswith("0.25.")


@stands_for("tinker:SamplingClient", own="__init__ seen")
class SamplingClient:
    """`without_logprobs`: as a server that gives none. `seen`: the parameters of each request."""

    def __init__(
        self, url: str, http: aiohttp.ClientSession, *, without_logprobs: bool = False
    ) -> None:
        self._url, self._http, self._without = url, http, without_logprobs
        self._old, self._loop = is_old(), asyncio.get_running_loop()
        self.seen: list[Any] = []

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        assert num_samples == 1
        sampling = self._sample(prompt.to_ints(), sampling_params)
        if self._old:
            return asyncio.run_coroutine_threadsafe(sampling, self._loop)
        return asyncio.ensure_future(sampling)

    async def sample_async(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        assert self._old, "deprecated since tinker 0.38"
        return await self._sample(prompt.to_ints(), sampling_params)

    async def _sample(self, ids: list[int], params: Any) -> Any:
        tinker = import_module("tinker")
        self.seen.append(params)
        sampling = {
            "max_new_tokens": params.max_tokens,
            "stop_token_ids": list(params.stop),
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        async with self._http.post(f"{self._url}/generate", json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        meta = answer["meta_info"]
        logprobs = np.array([one[0] for one in meta["output_token_logprobs"]], dtype=np.float32)
        sequence = tinker.SampledSequence(
            stop_reason=meta["finish_reason"]["type"],
            tokens_np=np.array(answer["output_ids"], dtype=np.int32),
            logprobs_np=None if self._without else logprobs,
            **({} if self._old else {"sequence_id": meta["id"]}),
        )
        return tinker.SampleResponse(sequences=[sequence])


@stands_for("tinker:APIFuture", own="__init__")
class Done:
    """Of what is there already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Any:
        return self.result_async().__await__()

    async def result_async(self) -> Any:
        return self._value


@stands_for("tinker:TrainingClient", own="__init__ policy trained steps")
class TrainingClient:
    """It adds to the gradients of `policy`, a network of torch, and takes no step. `trained`: the
    data that it got.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.trained: list[Any] = []
        self.steps = 0

    def forward_backward(self, data: list[Any], loss_fn: str, loss_fn_config: Any = None) -> Any:
        tinker = import_module("tinker")
        assert loss_fn == "importance_sampling"
        outputs = []
        for datum in data:
            inputs = {name: one.to_torch() for name, one in datum.loss_fn_inputs.items()}
            logps = importance_sampling(self.policy, datum.model_input.to_ints(), **inputs)
            outputs.append({"logprobs": tinker.TensorData.from_torch(logps.float())})
        self.trained += data
        return Done(
            tinker.ForwardBackwardOutput(
                loss_fn_output_type="", loss_fn_outputs=outputs, metrics={}
            )
        )

    def optim_step(self, optim_params: Any = None) -> Any:
        self.steps += 1
        return Done(import_module("tinker").OptimStepResponse(metrics={}))

    async def forward_backward_async(
        self, data: list[Any], loss_fn: str, loss_fn_config: Any = None
    ) -> Any:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    async def optim_step_async(self, optim_params: Any = None) -> Any:
        return self.optim_step(optim_params)


def importance_sampling(
    policy: Any, ids: list[int], target_tokens: Any, logprobs: Any, advantages: Any
) -> Any:
    """Backpropagate Tinker's loss of this name as its documentation has it, and return the policy's
    logprobs. It takes these inputs, and no others.
    """
    import torch

    logits = policy(torch.tensor([ids])).logits[0]
    logps = logits.log_softmax(-1).gather(-1, target_tokens[:, None])[:, 0]
    (-(logps - logprobs).exp() * advantages).sum().backward()
    return logps.detach()
