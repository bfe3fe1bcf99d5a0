"""One request to the embedded engine, for the stand-ins of trainers' engine objects."""

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from support.wire import Answer, Wire

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


def sglang_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's sampling parameters with the engine's names."""
    return {_NAMES.get(name, name): value for name, value in params.items()}


async def generate(
    url: str, input_ids: Sequence[int], params: Mapping[str, Any], session: str = "", **fields: Any
) -> Answer:
    """Sample one turn. `fields` are more of the request."""
    headers = {"X-SMG-Routing-Key": session} if session else None
    async with aiohttp.ClientSession() as http:
        wire = Wire(http, url)
        answer = await wire.generate(input_ids, headers=headers, fields=fields, **params)
    assert answer.status == 200, answer
    return answer
