"""Our engine client against the older versions of SGLang that trainers pin: the real server, with
the packages that it requires, in one folder for each version (`make test-older-sglang`).

What differs from 0.5.23 on the wire: an answer has the `weight_version` at its end, and no spans
(`weight_versions`); an unknown sampling parameter is a 500 without a reason, not a 400.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from support.processes import Server
from support.servers import sglang_server
from support.tiny_model import CONTEXT_LENGTH
from support.wire import Wire

from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.errors import ContextOverflowError
from toolroll.rollout.types import GenerateRequest, WeightVersion

FOLDERS = [Path(name) for name in os.environ.get("TOOLROLL_OLDER_SGLANG", "").split()]
"""Each is named `sglang-VERSION`."""
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not FOLDERS, reason="TOOLROLL_OLDER_SGLANG is not set: make test-all"),
]
PROMPT = np.arange(100, 140, dtype=np.int32)


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def older(request: pytest.FixtureRequest, log_folder: Path) -> Iterator[Server]:
    folder: Path = request.param
    assert (folder / "sglang").is_dir()
    with sglang_server(log_folder, name=folder.name, packages=folder) as server:
        yield server


def asked(prompt: np.ndarray = PROMPT, **params: object) -> GenerateRequest:
    params = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True, **params}
    ids = prompt.astype(np.int32)
    return GenerateRequest(ids, params, "session", extra={"top_logprobs_num": 2})


async def test_a_turn_has_its_ids_logprobs_and_version(older: Server, http: Any) -> None:
    """The server's own scoring of prompt and answer gives the logprobs that it sampled with."""
    seen: list[int] = []
    async with Engine(EngineConfig(engine=older.url)) as engine:
        info = await engine.model_info()
        found = await engine.generate(asked())
        with_progress = await engine.generate(asked(temperature=0.0), progress=seen.extend)
        again = await engine.generate(asked(temperature=0.0))
    assert f"sglang-{info.sglang_version}" == older.log.stem
    assert info.context_length == CONTEXT_LENGTH and info.weight_version == "default"
    assert len(found.output_ids) == 12 and found.finish_reason == "length"
    assert found.top_logprobs is not None and [len(top) for top in found.top_logprobs] == [2] * 12
    assert found.weight_versions == (WeightVersion("default", 0, 12),)
    assert with_progress.output_ids.tolist() == again.output_ids.tolist() == seen[-12:]
    whole = np.concatenate([PROMPT, found.output_ids])
    rescored = await Wire(http, older.url).rescore(whole.tolist())
    assert found.logprobs is not None and np.isfinite(found.logprobs).all()
    assert found.logprobs.tolist() == pytest.approx(rescored[-12:], abs=1e-3)


async def test_an_aborted_turn_says_so(older: Server, http: aiohttp.ClientSession) -> None:
    seen = asyncio.Event()
    async with Engine(EngineConfig(engine=older.url)) as engine:
        long = asked(max_new_tokens=CONTEXT_LENGTH - len(PROMPT) - 8)
        task = asyncio.create_task(engine.generate(long, progress=lambda ids: seen.set()))
        await seen.wait()
        aborted = await Wire(http, older.url).post("/abort_request", {"abort_all": True})
        assert aborted.status == 200
        found = await task
    assert found.finish_reason == "abort" and len(found.output_ids) > 0
    assert found.logprobs is not None and len(found.logprobs) == len(found.output_ids)


async def test_a_prompt_that_is_too_long_is_an_overflow(older: Server) -> None:
    prompt = np.full(CONTEXT_LENGTH + 10, 100)
    async with Engine(EngineConfig(engine=older.url)) as engine:
        with pytest.raises(ContextOverflowError):
            await engine.generate(asked(prompt, max_new_tokens=1))
