"""LoRA adapters that the real SGLang serves, named by each request."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Server
from support.tiny_model import logprobs_with, lora_adapter
from support.wire import Wire

from toolroll.rollout.engine import Engine
from toolroll.rollout.errors import EngineError
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.trajectory_json import from_json, to_json
from toolroll.rollout.types import GenerateRequest

PROMPT = list(range(1000, 1020))


async def test_each_turn_is_of_the_adapter_it_names(second_float32: Server, adapters: Any) -> None:
    """Later turns find the earlier tokens in the cache of the same adapter only."""
    path = SessionPath(Session("s"))
    path.observe(PROMPT)
    names = [None, "one", "one", "two", None]
    async with Engine(second_float32.url) as engine:
        for name in names:
            params = {"max_new_tokens": 8, "ignore_eos": True, "lora_path": name}
            completion = await engine.generate(GenerateRequest(path.input_ids, params, "s"))
            path.sample(completion, params)
            path.observe([5, 6, 7])
    [trajectory] = path.session.trajectories()
    recorded = from_json(to_json(trajectory))
    assert [turn.sampling_params.get("lora_path") for turn in recorded.turns] == names
    for name, turn in zip(names, recorded.turns, strict=True):
        ids, own = recorded.input_ids[: turn.stop], recorded.logprobs[turn.start : turn.stop]
        errors = {
            other: np.abs(logprobs_with(folder, ids, turn.start) - own).max()
            for other, folder in adapters.items()
        }
        assert errors.pop(name) < 1e-3 and min(errors.values()) > 0.1, errors


async def test_an_unknown_name_is_refused_and_not_tried_again(second_float32: Server) -> None:
    async with Engine(second_float32.url) as engine:
        with pytest.raises(EngineError, match="never been loaded: three") as caught:
            params = {"max_new_tokens": 2, "lora_path": "three"}
            await engine.generate(GenerateRequest(np.array(PROMPT, dtype=np.int32), params, "s"))
    assert (caught.value.status, caught.value.attempts) == (400, 1)


async def test_reloads_keep_the_version(second_float32: Server, http: Any, tmp_path: Path) -> None:
    """So the name is what tells them apart."""
    wire, versions = Wire(http, second_float32.url), []
    for seed in (7, 8):
        body = {"lora_name": "again", "lora_path": str(lora_adapter(tmp_path / str(seed), seed))}
        assert (await wire.post("/load_lora_adapter", body)).status == 200
        answer = await wire.generate(PROMPT, fields={"lora_path": "again"}, max_new_tokens=2)
        versions.append(answer.meta["weight_versions"])
        assert (await wire.post("/unload_lora_adapter", {"lora_name": "again"})).status == 200
    assert versions[0] == versions[1]
