"""One request to the embedded engine, for the stand-ins of trainers' engine objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


def sglang_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's sampling parameters with the engine's names."""
    return {_NAMES.get(name, name): value for name, value in params.items()}


@dataclass(frozen=True)
class Sampled:
    """What the engine sampled; `answer` is all that it returned."""

    answer: Mapping[str, Any]

    @property
    def ids(self) -> list[int]:
        return list(self.answer["output_ids"])

    @property
    def meta(self) -> Mapping[str, Any]:
        meta: Mapping[str, Any] = self.answer["meta_info"]
        return meta

    @property
    def logprobs(self) -> list[float]:
        return [value for value, *_ in self.meta["output_token_logprobs"]]

    @property
    def reason(self) -> str:
        return str(self.meta["finish_reason"]["type"])


async def generate(
    url: str,
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    session: str = "",
    **fields: Any,
) -> Sampled:
    """Sample one turn. `fields` are more of the request."""
    body = {
        "input_ids": list(input_ids), "sampling_params": dict(sampling_params),
        "return_logprob": True, **fields,
    }  # fmt: skip
    headers = {"X-SMG-Routing-Key": session} if session else {}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/generate", json=body, headers=headers) as response,
    ):
        answer = await response.json()
    assert response.status == 200, answer
    return Sampled(answer)
