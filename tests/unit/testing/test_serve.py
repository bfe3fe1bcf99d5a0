"""The embedded engine as a server: in a thread, as `toolroll engine`, and beside `/generate`."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from support.embedded import wired
from support.patience import PATIENCE
from support.tiny_llama import wired_model, write_tiny_llama

from toolroll.rollout.errors import UsageError
from toolroll.rollout.settings import EmbeddedEngineSettings
from toolroll.testing import EmbeddedEngine, PolicyRequest, serve_in_thread
from toolroll.testing.serve import _policy, serve


def ask(url: str, key: str = "s") -> str:
    body = json.dumps({"input_ids": [300, 301]}).encode()
    request = urllib.request.Request(
        f"{url}/generate", body, {"x-smg-routing-key": key, "Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return str(json.loads(response.read())["text"])


def test_a_missing_reply_is_a_warning(tokenizer: Any, tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"s": ["One.", "Two."], "t": []}', encoding="utf-8")
    with serve_in_thread(EmbeddedEngine(tokenizer, _policy(path))) as engine:
        texts = [ask(engine.url, key) for key in ("S", "x", "s", "s", "s", "s")]
    assert texts == [*["I am done."] * 2, "One.", "Two.", *["I am done."] * 2]
    assert [record.getMessage() for record in caplog.records] == [
        "no replies for 'S', so it gets 'I am done.'; the keys are 's', 't'",
        "all 2 replies of 's' were sent; to send them again, restart this engine",
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"s": "One."}', '{"s": [1]}', '{"s": []}\nhm', "5"]
)
async def test_a_wrong_script_is_told_with_its_shape(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text, encoding="utf-8")
    async with asyncio.timeout(PATIENCE):
        await refused(r'script\.json is not a JSON object \{"routing key"', script=path)


async def refused(words: str, **settings: Any) -> None:
    with pytest.raises(UsageError, match=words):
        await serve(EmbeddedEngineSettings(**{"port": 0, **settings}))


async def test_what_cannot_be_served_says_why(tmp_path: Path, tokenizer: Any) -> None:
    model, nothing = str(write_tiny_llama(tmp_path / "llama")), str(tmp_path / "nothing")
    await refused("no tokenizer can be loaded from", tokenizer=nothing)
    await refused(r"nothing\.json cannot be read", script=Path(f"{nothing}.json"))
    async with EmbeddedEngine(tokenizer) as engine:
        port = int(engine.url.rpartition(":")[2])
        await refused(rf"cannot listen on 127\.0\.0\.1:{port}: .*in use", port=port)
    await refused(r"config\.json cannot be read", model=str(tmp_path))
    words = "the context length is at most 1024, not 1025"
    await refused(words, model=model, context_length=1025)
    for name, value in {"tokenizer": "embedded", "script": tmp_path, "latency": 0.1}.items():
        await refused(f"--{name} cannot be combined with --model", model=model, **{name: value})


# --- beside /generate: health, facts, chat completions --------------------------------------------


async def test_the_info_endpoints_have_sglangs_fields() -> None:
    """The engine is its own worker: slime asks a router for its workers, to abort requests."""
    async with wired(context_length=2048, weight_version="step3") as (engine, wire):
        model, server, models, listed = [
            (await wire.get(path)).body
            for path in ("/model_info", "/server_info", "/v1/models", "/workers")
        ]
        assert (await wire.get("/get_model_info")).body == model
        assert (await wire.get("/get_server_info")).body == server
    assert model["weight_version"] == "step3"
    assert (server["context_length"], server["version"]) == (2048, "0.5.23+embedded")
    assert server["max_req_input_len"] == 2048 - 6  # what the real server says for this context
    assert models["data"][0]["max_model_len"] == 2048
    assert [worker["url"] for worker in listed["workers"]] == [engine.url]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_texts_are_tokenized(tokenizer: Any, path: str) -> None:
    text = "Hello, <|end|> wörld"
    ids = tokenizer.encode(text, add_special_tokens=False)
    async with wired(context_length=777) as (engine, wire):
        one = await wire.post(path, {"prompt": text, "add_special_tokens": False})
        two = await wire.post(path, {"prompt": [text, ""]})
        refused = [(await wire.post(path, {"prompt": prompt})).status for prompt in (None, 5, [5])]
    assert (one.status, one.body) == (200, {"tokens": ids, "count": len(ids), "max_model_len": 777})
    assert two.body == {"tokens": [ids, []], "count": [len(ids), 0], "max_model_len": 777}
    assert refused == [400] * 3 and engine.log == []


async def test_health_can_be_set_to_failing_and_other_paths_are_404s() -> None:
    async with wired() as (engine, wire):
        paths = ("/health", "/get_weight_version")
        assert [(await wire.get(path)).status for path in paths] == [200, 404]
        engine.healthy = False
        for path in ("/health", "/health_generate"):
            assert (await wire.get(path)).status == 503


async def test_the_openai_client_gets_a_chat_completion(tokenizer: Any) -> None:
    seen: list[PolicyRequest] = []
    messages: Any = [
        {"role": "system", "content": "You are the user."},
        {"role": "user", "content": "Hello."},
    ]
    async with (
        wired(lambda request: seen.append(request) or "I want a refund.") as (engine, _),  # type: ignore[func-returns-value]
        openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(
            model="any", messages=messages, max_tokens=30, stop=["refund"]
        )
        with pytest.raises(openai.BadRequestError, match="stream"):
            await client.chat.completions.create(model="any", messages=messages, stream=True)
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(model="any", messages=[])
    assert answer.choices[0].message.content == "I want a "
    assert answer.choices[0].finish_reason == "stop"
    options = {"add_generation_prompt": True, "tokenize": False}
    assert seen[0].text == tokenizer.apply_chat_template(messages, **options)
    assert seen[0].sampling_params["max_new_tokens"] == 30
    assert answer.usage is not None and answer.usage.prompt_tokens == len(seen[0].input_ids)


JSON_OBJECT = ("response_format", {"type": "json_object"})
NO_EFFECT = [("n", 2), ("tools", [{}]), ("logprobs", True), JSON_OBJECT]
WRONG = [("temperature", -1), ("temperature", "warm"), ("stop", 5), ("seed", "x")]


@pytest.mark.parametrize(("field", "value"), [*NO_EFFECT, *WRONG])
async def test_a_field_of_a_chat_request_without_effect_is_refused(field: str, value: Any) -> None:
    async with wired() as (engine, wire):
        body = {"messages": [{"role": "user", "content": "Hello."}], field: value}
        answer = await wire.post("/v1/chat/completions", body)
    assert (answer.status, field in answer.message) == (400, True)
    assert engine.log == []


async def test_a_seed_reproduces_a_chat_completion(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8, "n": 1}
    async with wired_model(write_tiny_llama(tmp_path)) as (_, wire):
        answers = [
            await wire.post("/v1/chat/completions", {**body, "seed": seed}) for seed in (5, 5, 6)
        ]
    texts = [answer.body["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1] != texts[2]
