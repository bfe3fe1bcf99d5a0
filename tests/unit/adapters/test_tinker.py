"""The Tinker adapter with a stand-in for tinker. The package itself is in
tests/contract/test_tinker.py.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from support import tinker_mirror
from support.forked_episodes import episode
from support.slime_trainer import plays_the_reference
from support.source import ROOT

from toolroll.rollout.errors import CompletionError, TokenError, UsageError
from toolroll.rollout.types import GenerateRequest
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.trainers.tinker import TinkerEngine, to_datums

REQUEST = GenerateRequest(
    np.array([1, 2], dtype=np.int32), {"max_new_tokens": 8, "stop_token_ids": [9]}, "session"
)


@pytest.fixture(autouse=True)
def _tinker(monkeypatch: pytest.MonkeyPatch) -> None:
    tinker_mirror.install(monkeypatch)


@asynccontextmanager
async def sampling(**given: Any) -> AsyncIterator[tuple[Any, tinker_mirror.SamplingClient]]:
    tokenizer = load_embedded_tokenizer()
    async with (
        EmbeddedEngine(tokenizer, plays_the_reference) as engine,
        aiohttp.ClientSession() as http,
    ):
        yield tokenizer, tinker_mirror.SamplingClient(engine.url, http, **given)


async def test_the_example_of_the_page() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tinker.md").read_text(), re.S)
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "tinker.md", "exec"), page)
    async with sampling() as (tokenizer, client):
        player = page["make_player"](None, tokenizer)
        datums = await page["data"](player, client, 0)
        await player.aclose()
    assert len(datums) == 8
    ends = {tokenizer.eos_token_id}
    assert {tuple(params.stop) for params in client.seen} == {tuple(ends)}
    for datum in datums:
        ids, inputs = datum.model_input.to_ints(), datum.loss_fn_inputs
        assert inputs["target_tokens"].tolist()[:-1] == ids[1:]
        assert inputs["target_tokens"][-1] in ends
        assert {len(column) for column in inputs.values()} == {len(ids)}


@pytest.mark.parametrize(
    "name", "min_p stop frequency_penalty presence_penalty repetition_penalty regex".split()
)
async def test_what_tinker_does_not_have_is_refused(name: str) -> None:
    """tinker's `SamplingParams` would ignore it."""
    engine = TinkerEngine(None, context_length=64, vocab_size=10)
    params = {**REQUEST.sampling_params, name: 0.5}
    with pytest.raises(UsageError, match=f"Tinker has no sampling parameter '{name}'"):
        await engine.generate(GenerateRequest(REQUEST.input_ids, params, "session"))
    extra = {"lora_path": "a", "top_logprobs_num": 5}
    with pytest.raises(UsageError, match="Tinker has no lora_path, top_logprobs_num"):
        await engine.generate(
            GenerateRequest(REQUEST.input_ids, REQUEST.sampling_params, "session", extra=extra)
        )


async def test_each_sampling_parameter_has_tinkers_name() -> None:
    given = {"sampling_seed": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5}
    params = {**REQUEST.sampling_params, **given}
    async with sampling() as (tokenizer, client):
        engine = TinkerEngine(client, context_length=64, vocab_size=len(tokenizer))
        turn = await engine.generate(GenerateRequest(REQUEST.input_ids, params, "session"))
    assert len(turn.output_ids) == 8 and turn.finish_reason == "length"
    assert client.seen == [
        tinker_mirror.SamplingParams(8, seed=3, stop=[9], temperature=0.7, top_k=5, top_p=0.9)
    ]


async def test_a_turn_without_logprobs_is_refused() -> None:
    async with sampling(without_logprobs=True) as (tokenizer, client):
        engine = TinkerEngine(client, context_length=64, vocab_size=len(tokenizer))
        with pytest.raises(CompletionError, match="0 logprobs for"):
            await engine.generate(REQUEST)


# --- to_datums ------------------------------------------------------------------------------------


def inputs_of(datum: Any) -> dict[str, list[float]]:
    return {name: column.tolist() for name, column in datum.loss_fn_inputs.items()}


def test_a_datum_is_shifted_by_one_token() -> None:
    (datum,) = to_datums(episode(1.0), 0.5)
    trained = [*range(4, 8), *range(10, 16)]
    assert datum.model_input.to_ints() == [*range(15)]
    assert inputs_of(datum) == {
        "target_tokens": [*range(1, 16)],
        "logprobs": [-1.0 if i in trained else 0.0 for i in range(1, 16)],
        "advantages": [0.5 if i in trained else 0.0 for i in range(1, 16)],
    }
    (other,) = to_datums(episode(1.0), 1.0, loss_fn="cross_entropy")
    assert inputs_of(other) == {
        "target_tokens": [*range(1, 16)],
        "weights": [float(i in trained) for i in range(1, 16)],
    }


def test_a_forked_episode_has_several() -> None:
    first, second = to_datums(episode(1.0, forked=True), 0.5)
    assert np.flatnonzero(first.loss_fn_inputs["advantages"]).tolist() == [3, 4, 5, 6]
    assert np.flatnonzero(second.loss_fn_inputs["advantages"]).tolist() == [9, 10, 11, 12, 13, 14]


def test_an_aborted_episode_has_none() -> None:
    assert to_datums(episode(None), None) == []
    with pytest.raises(UsageError, match="the value is None"):
        to_datums(episode(1.0), None)


def test_a_trained_token_without_a_logprob_is_refused() -> None:
    result = episode(1.0)
    result.trajectories[0].logprobs[11] = np.nan
    with pytest.raises(TokenError, match="1 trained tokens have no logprob"):
        to_datums(result, 1.0)
