"""What toolroll relies on in the real SGLang and its routers, beside what `test_routers.py`,
`test_episodes.py` and `test_weight_updates.py` show. And which model serves, by both."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web
from support.episodes import opened_model
from support.http import http_server
from support.processes import Server
from support.qwen import qwen3_tokenizer
from support.tiny_model import CONTEXT_LENGTH, tiny_model
from support.wire import Answer, Wire, until

from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runtime.sglang_names import SGLANG_NAMES
from toolroll.testing import load_embedded_tokenizer

HELLO, IM_END, TOOL_CALL_END = 9707, 151645, 151658
FORCE = 300.0  # a logit bias that beats every logit of the tiny model
LONG: dict[str, Any] = {"max_new_tokens": 3500, "ignore_eos": True, "temperature": 1.0}


def fresh_prompt(length: int) -> list[int]:
    """Ids that no earlier request began with, so that nothing of them is cached."""
    return np.random.default_rng(uuid.uuid4().int).integers(1000, 100_000, length).tolist()


@asynccontextmanager
async def long_request(wire: Wire, rid: str) -> AsyncIterator[asyncio.Task[Answer]]:
    """A request that runs for some twenty seconds, unless it is ended; ended in any case."""
    before = await wire.running()

    async def runs() -> bool:
        return await wire.running() > before

    task = asyncio.create_task(wire.generate(fresh_prompt(12), fields={"rid": rid}, **LONG))
    try:
        await until(runs, f"request {rid} runs")
        yield task
    finally:
        await wire.post("/abort_request", {"rid": rid})
        await asyncio.gather(task, return_exceptions=True)


# --- what comes back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "params", "text", "matched"),
    [
        (IM_END, {}, "", IM_END),
        (IM_END, {"skip_special_tokens": False, "no_stop_trim": True}, "<|im_end|>", IM_END),
        (TOOL_CALL_END, {"stop_token_ids": [TOOL_CALL_END]}, "", TOOL_CALL_END),
        (HELLO, {"stop": ["lo"]}, "Hel", "lo"),
    ],
)
async def test_the_stop_token_is_in_output_ids(
    float32: Wire, token: int, params: dict[str, Any], text: str, matched: object
) -> None:
    answer = await float32.generate(
        fresh_prompt(5), max_new_tokens=4, logit_bias={str(token): FORCE}, **params
    )
    assert answer.output_ids == [token]
    assert answer.body["text"] == text
    assert answer.meta["finish_reason"] == {"type": "stop", "matched": matched}
    assert answer.logprobs == pytest.approx([0.0], abs=1e-4)  # the bias counts in the logprob


# --- logprobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.6}, {"temperature": 1.5}, {"temperature": 0.8, "top_p": 0.5, "top_k": 20}],
)
async def test_logprobs_are_of_the_logits_over_the_temperature(float32: Wire, params: Any) -> None:
    """And not renormalised by top-p and top-k. Computed anew with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt = fresh_prompt(30)
    answer = await float32.generate(prompt, max_new_tokens=30, ignore_eos=True, **params)
    model = AutoModelForCausalLM.from_pretrained(tiny_model("float32"), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer.output_ids])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / params["temperature"], dim=-1)[
        torch.arange(30), torch.tensor(answer.output_ids)
    ]
    assert np.abs(np.array(answer.logprobs) - expected.numpy()).max() <= 1e-3


# --- aborts ---------------------------------------------------------------------------------------


async def test_an_abort_matches_by_prefix(float32: Wire) -> None:
    stem = uuid.uuid4().hex
    other = uuid.uuid4().hex
    async with (
        long_request(float32, f"{stem}1") as one,
        long_request(float32, f"{stem}10") as ten,
        long_request(float32, other) as spared,
    ):
        assert (await float32.post("/abort_request", {"rid": f"{stem}1"})).status == 200
        for answer in await asyncio.gather(one, ten):
            assert (answer.status, answer.meta["finish_reason"]["type"]) == (200, "abort")
            assert 0 < len(answer.output_ids) < LONG["max_new_tokens"]
            assert [item[1] for item in answer.meta["output_token_logprobs"]] == answer.output_ids
        assert not spared.done()


def disconnected(server: Server, rid: str) -> bool:
    """Whether the server wrote that the client of this request hung up."""
    lines = server.log.read_text(errors="replace").splitlines()
    return any(rid in line and "disconnected from the client side" in line for line in lines)


async def test_a_client_that_hangs_up_is_aborted(float32: Wire, sglang_float32: Server) -> None:
    rid = uuid.uuid4().hex
    async with long_request(float32, rid) as task:
        again = await float32.generate([HELLO], fields={"rid": rid}, max_new_tokens=1)
        assert again.message.startswith("Duplicate request ID")
        task.cancel()
        await until(float32.idle, "the abandoned request is gone")  # after some 4 s
    assert disconnected(sglang_float32, rid)
    again = await float32.generate([HELLO], fields={"rid": rid}, max_new_tokens=1)
    assert again.status == 200  # a rid may come again once its request is over


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_new_tokens", "words"),
    [
        (CONTEXT_LENGTH, 1, "is longer than the model's context length"),
        (CONTEXT_LENGTH - 100, 101, "exceeds the model's maximum context length"),
        (CONTEXT_LENGTH - 2, 1, "exceeds the maximum allowed length"),
    ],
)
async def test_an_overflow_of_the_context_is_a_400(
    float32: Wire, length: int, max_new_tokens: int, words: str
) -> None:
    answer = await float32.generate(fresh_prompt(length), max_new_tokens=max_new_tokens)
    assert answer.status == 400
    assert list(answer.body) == ["error"]
    assert words in answer.body["error"]["message"]


async def test_a_prompt_must_be_shorter_than_max_req_input_len(float32: Wire) -> None:
    """`max_req_input_len` itself is refused; sampling ends two tokens short of the context."""
    limit = (await float32.get("/server_info")).body["max_req_input_len"]
    assert limit == CONTEXT_LENGTH - 6
    refused = await float32.generate(fresh_prompt(limit), max_new_tokens=1)
    assert (refused.status, refused.message.startswith("Input length")) == (400, True)
    length = limit - 1
    params = {"max_new_tokens": CONTEXT_LENGTH - length, "ignore_eos": True, "temperature": 1.0}
    answer = await float32.generate(fresh_prompt(length), **params)
    assert answer.status == 200
    assert len(answer.output_ids) == CONTEXT_LENGTH - length - 2
    assert answer.meta["finish_reason"] == {"type": "length", "length": len(answer.output_ids)}


async def test_an_unknown_sampling_parameter_is_a_400_with_the_known(float32: Wire) -> None:
    answer = await float32.generate([HELLO], max_tokens=3)
    assert answer.status == 400
    unknown, *names = re.findall("`(.*?)`", answer.body["error"])
    assert (unknown, tuple(names)) == ("max_tokens", SGLANG_NAMES)


# --- behind each router ---------------------------------------------------------------------------


@pytest.fixture
def routed(http: aiohttp.ClientSession, routed_sglang: Any) -> Wire:
    routed_sglang.clear()
    return Wire(http, routed_sglang.url)


async def test_refusals_come_through_and_harm_no_one(routed: Wire) -> None:
    """An unknown adapter's, to both workers, of which one was started without adapters. With the
    circuit breaker on, ten overflows shut out every client."""
    fields = {"lora_path": "absent"}
    answer = await routed.generate(fresh_prompt(8), fields=fields, max_new_tokens=1)
    assert answer.status == 400
    assert "LoRA adapter" in answer.message and "absent" in answer.message
    for _ in range(12):
        answer = await routed.generate(fresh_prompt(4200), max_new_tokens=1)
        assert answer.status == 400
        assert "longer than the model's context length" in answer.message
    assert (await routed.generate(fresh_prompt(5), max_new_tokens=1)).status == 200


async def test_a_client_that_hangs_up_is_aborted_behind_it(routed: Any, routed_sglang: Any) -> None:
    rid = uuid.uuid4().hex
    task = asyncio.create_task(routed.generate(fresh_prompt(10), fields={"rid": rid}, **LONG))
    await until(partial(routed_sglang.running, routed.http), "a worker runs the request")
    task.cancel()
    await until(partial(routed_sglang.idle, routed.http), "the abandoned request is gone")
    (seen,) = [seen for proxy in routed_sglang.proxies for seen in proxy.generations()]
    assert seen.hung_up
    assert any(disconnected(worker, rid) for worker in routed_sglang.workers)


# --- which model serves ---------------------------------------------------------------------------


def serving(url: str, tokenizer: Any, name: str) -> AbstractAsyncContextManager[Model]:
    return opened_model(url, tokenizer, "qwen25", name=name, config={"vocab_size": None})


async def test_the_id_of_an_answer_is_the_rid(http: Any, routed_sglang: Any) -> None:
    for wire in (Wire(http, routed_sglang.workers[0].url), Wire(http, routed_sglang.url)):
        rid = uuid.uuid4().hex
        answer = await wire.generate([HELLO, 11, 1879], fields={"rid": rid}, max_new_tokens=3)
        assert answer.meta["id"] == rid
        params = {"max_new_tokens": 3, "ignore_eos": True}
        body = {
            "input_ids": [HELLO, 11, 1879],
            "rid": rid,
            "stream": True,
            "sampling_params": params,
        }
        async with http.post(f"{wire.url}/generate", json=body) as response:
            lines = [line async for line in response.content if line.startswith(b"data: {")]
        assert [orjson.loads(line[6:])["meta_info"]["id"] for line in lines] == [rid] * len(lines)
        # in up to three events: the server joins some
        assert len(orjson.loads(lines[-1][6:])["output_ids"]) == 3


async def test_the_right_model_passes_and_the_wrong_one_is_refused(routed_sglang: Any) -> None:
    """At the server and behind the router. What is refused harms nobody."""
    routed_sglang.clear()
    wrong = f"'{tiny_model()}', whose tokenizer is not that of 'embedded'"
    other = f"the engine serves '{tiny_model()}', the tokenizer is from 'Qwen/Qwen3-8B'"
    for url in (routed_sglang.workers[0].url, routed_sglang.url):
        async with serving(url, qwen3_tokenizer(), str(tiny_model())) as served:
            assert await served.check_identity() == []
        async with serving(url, qwen3_tokenizer(), "Qwen/Qwen3-8B") as served:
            [line] = await served.check_identity()
            assert line.startswith(other)
    assert [proxy.generations() for proxy in routed_sglang.proxies] == [[], []]
    for url in (routed_sglang.workers[0].url, routed_sglang.url):
        async with serving(url, load_embedded_tokenizer(), "embedded") as served:
            with pytest.raises(UsageError, match=wrong):
                await served.check_identity()
            assert (await served.engine.health()).ok


async def test_through_a_router_a_generation_tells_the_ids(http: Any, routed_sglang: Any) -> None:
    """As where the workers cannot be reached: nothing is passed on but `/generate`."""

    async def forward(request: web.Request) -> web.StreamResponse:
        url, body = f"{routed_sglang.url}/generate", await request.read()
        headers = {"Content-Type": request.content_type}
        async with http.post(url, data=body, headers=headers) as response:
            return web.Response(status=response.status, body=await response.read())

    async with http_server({"/generate": forward}) as url:
        async with serving(url, qwen3_tokenizer(), "qwen") as served:
            assert await served.check_identity() == []
        async with serving(url, load_embedded_tokenizer(), "embedded") as served:
            with pytest.raises(UsageError, match="whose tokenizer is not that of 'embedded'"):
                await served.check_identity()
