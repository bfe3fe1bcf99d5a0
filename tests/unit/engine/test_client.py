"""`Engine`: what it sends, and what it never sends."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.client import answering, client_of, embedded, flaky, request
from support.http import completion, says
from support.tiers import costly

from toolroll.rollout.engine import Engine
from toolroll.rollout.errors import ContextOverflowError, TokenError, UsageError
from toolroll.rollout.media import Image
from toolroll.rollout.types import GenerateRequest
from toolroll.testing import Fault, fault_at, script

# --- what is sent ---------------------------------------------------------------------------------


def body_of(sent: GenerateRequest, *, stream: bool = False) -> Any:
    return orjson.loads(Engine("http://nowhere")._body(sent, "r1", stream=stream))


@costly(2)
@given(
    ids=st.lists(st.integers(0, 4999), min_size=1, max_size=300),
    spliced=st.booleans(),
    logprobs=st.booleans(),
)
def test_the_body_holds_exactly_the_request(ids: list[int], spliced: bool, logprobs: bool) -> None:
    encoded: Any = {"input_ids_json": orjson.dumps(ids)[1:-1]} if spliced else {}
    fields: Any = {"extra": {"session_id": "x"}, "sampling_params": {"stop": ['"é']}}
    assert body_of(request(ids, **encoded, **fields, return_logprob=logprobs)) == {
        "input_ids": ids,
        "sampling_params": {"stop": ['"é']},
        "return_logprob": logprobs,
        "stream": False,
        "rid": "r1",
        "session_id": "x",
    }


def test_each_image_is_one_token_beside_its_data() -> None:
    images = (Image(1, 3, "a", url="data:a"), Image(4, 1, "b", url="data:b"))
    asked = request([7, 9, 9, 9, 9, 8], images=images, input_ids_json=b"7")
    body = body_of(asked, stream=True)
    assert (body["input_ids"], body["image_data"]) == ([7, 9, 9, 8], ["data:a", "data:b"])
    assert body["return_prompt_token_ids"] is True


def test_an_adapter_is_named_beside_the_sampling_parameters() -> None:
    params = {"top_k": 5, "lora_path": "one"}
    body = body_of(request([1], sampling_params=params))
    assert (body["sampling_params"], body["lora_path"]) == ({"top_k": 5}, "one")


def test_a_strided_array_is_sent_in_its_own_order() -> None:
    asked = GenerateRequest(np.arange(10, dtype=np.int32)[::2], {}, "s")
    assert body_of(asked)["input_ids"] == [0, 2, 4, 6, 8]


async def test_what_the_engine_gets_and_what_comes_back(tokenizer: Any) -> None:
    async with embedded(tokenizer, script({"episode/7": ["Hello."]})) as (engine, calls):
        answer = await calls.generate(request([5, 6, 7], session="episode/7"))
    [entry] = engine.log
    assert entry.input_ids.tolist() == [5, 6, 7]
    assert entry.routing_key == "episode/7"
    assert entry.headers["content-type"] == "application/json"
    assert answer.output_ids.tolist() == entry.output_ids
    assert np.array_equal(answer.logprobs, np.array(entry.logprobs, dtype=np.float32))  # type: ignore[arg-type]
    assert (answer.finish_reason, answer.text) == ("stop", "Hello.")
    assert answer.matched == tokenizer.eos_token_id
    assert (answer.prompt_tokens, answer.attempts, answer.rid) == (3, 1, entry.rid)
    assert answer.latency > 0 and answer.weight_version == "default"


async def test_rids_are_fresh_and_no_ones_prefix(tokenizer: Any) -> None:
    """SGLang aborts every request whose rid begins with the one that is named."""
    faults = fault_at({0: Fault(status=503), 1: Fault(status=503)})
    async with embedded(tokenizer, faults=faults) as (engine, calls):
        await asyncio.gather(*(calls.generate(request(session=f"s{at}")) for at in range(20)))
    rids = [entry.rid for entry in engine.log]
    assert len(rids) == 22 and len(set(rids)) == 22
    assert len({len(rid) for rid in rids}) == 1
    assert not any(a.startswith(b) for a, b in itertools.permutations(rids, 2))


# --- what is never sent ---------------------------------------------------------------------------


OUTSIDE = r"input_ids\[1\] is 5000, outside the vocabulary of 5000"
LONG = "^prompt is too long: 1000 tokens > 999 maximum"
NO_HEADER = r"the session id 'two\\nlines' cannot be sent as a header"


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (request([]), TokenError, "the prompt is empty"),
        (request([5, 5000, 7]), TokenError, OUTSIDE),
        (request([5, 6, -1]), TokenError, r"input_ids\[2\] is -1"),
        (request(range(1000)), ContextOverflowError, LONG),
        (request(sampling_params={"temprature": 1.0}), UsageError, "did you mean 'temperature'"),
        (request(session="two\nlines"), UsageError, NO_HEADER),
    ],
)
async def test_what_cannot_succeed_is_never_sent(
    tokenizer: Any, asked: GenerateRequest, kind: type[Exception], words: str
) -> None:
    async with embedded(tokenizer) as (engine, calls):
        with pytest.raises(kind, match=words):
            await calls.generate(asked)
    assert engine.log == [] and engine.killed == 0


async def test_a_newer_name_is_sent_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    seen, answer = flaky(completion([5, 3]))
    async with answering(answer) as calls:
        for _ in range(2):
            await calls.generate(request(sampling_params={"bogus": 1}))
    assert [body["sampling_params"]["bogus"] for body in seen] == [1, 1]
    assert len([record for record in caplog.records if "'bogus'" in record.getMessage()]) == 1


async def test_an_id_that_the_engine_sampled_may_be_sent_back(tokenizer: Any) -> None:
    """Models have more rows than tokenizers have tokens, and a random policy samples them."""
    async with answering(says(completion([5300, 3]))) as calls:
        with pytest.raises(TokenError):
            await calls.generate(request([5300]))
        await calls.generate(request([1]))
        await calls.generate(request([1, 5300, 3]))
        for other in (5299, 5301):  # that one alone
            words = rf"input_ids\[1\] is {other}, outside the vocabulary of 5000"
            with pytest.raises(TokenError, match=words):
                await calls.generate(request([5300, other]))


async def test_a_parameter_that_a_router_drops_is_refused_behind_one() -> None:
    routes = {
        "/generate": says(completion([3])),
        "/workers": says({"workers": [{"url": "http://127.0.0.1:9"}]}),
    }
    asked = request(sampling_params={"logit_bias": {"5": 1.0}})
    async with client_of(routes) as calls:
        await calls.workers()
        words = "router silently drops the sampling parameter 'logit_bias'"
        with pytest.raises(UsageError, match=words):
            await calls.generate(asked)
        batch = {"sampling_params": [{}, asked.sampling_params]}
        with pytest.raises(UsageError, match="sampling parameter 'logit_bias'"):
            await calls.post(f"{calls.url}/generate", batch)
    async with answering(says(completion([3]))) as calls:
        await calls.workers()
        assert (await calls.generate(asked)).output_ids.tolist() == [3]
        assert (await calls.post(f"{calls.url}/generate", batch))["output_ids"] == [3]
