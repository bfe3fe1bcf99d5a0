"""Doubles of tinker 0.38.0's clients, with the installed package's types: a `SamplingClient` that
samples from the embedded engine, and a `TrainingClient` that trains a small network.
"""

import asyncio
from importlib import import_module
from typing import Any

import numpy as np
from support.standins import stands_for
from support.wire import generate


def is_old() -> bool:
    """Whether the tinker in use is 0.25, whose futures cannot be awaited."""
    return getattr(import_module("tinker"), "__version__", "").startswith("0.25.")


@stands_for("tinker:SamplingClient", own="__init__ seen")
class SamplingClient:
    """`without_logprobs`: as a server that gives none. `seen`: the parameters of each request."""

    def __init__(self, url: str, *, without_logprobs: bool = False) -> None:
        self._url, self._without = url, without_logprobs
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
        sampled = await generate(self._url, ids, sampling)
        sequence = tinker.SampledSequence(
            stop_reason=sampled.reason,
            tokens_np=np.array(sampled.output_ids, dtype=np.int32),
            logprobs_np=None if self._without else np.array(sampled.logprobs, dtype=np.float32),
            **({} if self._old else {"sequence_id": sampled.meta["id"]}),
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
