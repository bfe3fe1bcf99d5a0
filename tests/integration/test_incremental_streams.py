"""A real server that sends only the new ids in each event of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.processes import Server

from toolroll.rollout.engine import Engine
from toolroll.rollout.types import GenerateRequest


async def test_an_answer_is_the_same_streamed_or_not(sglang_small: Server) -> None:
    params: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    prompt = np.array([40, 1079, 264], dtype=np.int32)
    asked = GenerateRequest(prompt, params, "s", extra={"top_logprobs_num": 2})
    told: list[Sequence[int]] = []
    async with Engine(sglang_small.url) as engine:
        await engine.generate(asked)  # so that both find the prompt in the cache
        whole = await engine.generate(asked)
        streamed = await engine.generate(asked, progress=told.append)
    ids = whole.output_ids.tolist()
    assert streamed.output_ids.tolist() == ids and len(ids) == 40
    assert len(told) > 1 and all(list(part) == ids[: len(part)] for part in told)
    assert whole.logprobs is not None and whole.top_logprobs is not None
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert streamed.top_logprobs is not None
    assert [[index for _, index in place] for place in streamed.top_logprobs] == [
        [index for _, index in place] for place in whole.top_logprobs
    ]
    assert streamed.text == whole.text
    assert streamed.weight_versions == whole.weight_versions
