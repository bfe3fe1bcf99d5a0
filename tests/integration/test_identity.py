"""Whose answer it is, and which model serves, by the real server and the real router."""

import uuid
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.episodes import opened_model
from support.http import http_server
from support.qwen import qwen3_tokenizer
from support.tiny_model import tiny_model
from support.wire import Wire

from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.identity import probe_text
from toolroll.rollout.model.model import Model
from toolroll.testing import load_embedded_tokenizer

PROMPT = [9707, 11, 1879]


def serving(url: str, tokenizer: Any, name: str) -> AbstractAsyncContextManager[Model]:
    return opened_model(url, tokenizer, "qwen25", name=name, config={"vocab_size": None})


async def test_tokenize_gives_the_tokenizers_own_ids(float32: Wire) -> None:
    tokenizer = qwen3_tokenizer()
    assert isinstance(tokenizer.chat_template, str)
    text = probe_text(tokenizer, tokenizer.chat_template)
    answer = await float32.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (answer.status, answer.body["tokens"], answer.body["count"]) == (200, ids, len(ids))
    assert tokenizer.eos_token_id in ids


async def test_the_id_of_an_answer_is_the_rid(http: Any, routed_sglang: Any) -> None:
    for wire in (Wire(http, routed_sglang.workers[0].url), Wire(http, routed_sglang.url)):
        rid = uuid.uuid4().hex
        answer = await wire.generate(PROMPT, fields={"rid": rid}, max_new_tokens=3)
        assert answer.meta["id"] == rid
        params = {"max_new_tokens": 3, "ignore_eos": True}
        body = {"input_ids": PROMPT, "rid": rid, "stream": True, "sampling_params": params}
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
