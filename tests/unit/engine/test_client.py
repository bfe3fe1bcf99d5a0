"""`Engine`: what it sends and never sends, what it tries again, and what it leaves behind."""

import asyncio
import itertools
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from support.client import Pauses, answering, client, client_of, embedded, flaky, refusal, request
from support.http import completion, http_server, says
from support.loop_clock import skip
from support.patience import PATIENCE
from support.tiers import costly

from toolroll import Engine, GenerateRequest
from toolroll.rollout.engine.errors import from_exception, from_response
from toolroll.rollout.engine.model_info import ModelInfo, read_model_info
from toolroll.rollout.engine.sampling_params import (
    DEFAULT_MAX_NEW_TOKENS,
    DROPPED_BY_SMG,
    check_dropped,
    effective_params,
)
from toolroll.rollout.errors import ContextOverflowError, EngineError, TokenError, UsageError
from toolroll.rollout.media import Image
from toolroll.rollout.runtime.param_names import KNOWN, check_params
from toolroll.testing import Fault, Reply, fault_at, script

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


def test_each_image_is_one_token_and_an_adapter_has_a_field() -> None:
    """A strided array of ids is sent in its own order."""
    images = (Image(1, 3, "a", url="data:a"), Image(4, 1, "b", url="data:b"))
    params = {"top_k": 5, "lora_path": "one"}
    ids = [7, 9, 9, 9, 9, 8]
    sent = request(ids, images=images, input_ids_json=b"7", sampling_params=params)
    body = body_of(sent, stream=True)
    assert (body["input_ids"], body["image_data"]) == ([7, 9, 9, 8], ["data:a", "data:b"])
    assert body["return_prompt_token_ids"] is True
    assert (body["sampling_params"], body["lora_path"]) == ({"top_k": 5}, "one")
    strided = GenerateRequest(np.arange(10, dtype=np.int32)[::2], {}, "s")
    assert body_of(strided)["input_ids"] == [0, 2, 4, 6, 8]


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


# --- what is tried again --------------------------------------------------------------------------


async def test_what_can_succeed_is_tried_again() -> None:
    seen, handle = flaky(refusal(503, {"message": "busy"}), refusal(408), completion([3]))
    pauses = Pauses()
    async with answering(handle, sleep=pauses, backoff=0.5) as calls:
        answer = await calls.generate(request())
    assert answer.attempts == 3 and answer.output_ids.tolist() == [3]
    assert len({body["rid"] for body in seen}) == 3
    assert [{**body, "rid": ""} for body in seen] == [{**seen[0], "rid": ""}] * 3
    assert 0.25 <= pauses[0] <= 0.75 and 0.5 <= pauses[1] <= 1.5


async def test_the_pauses_grow_to_a_limit_and_are_jittered() -> None:
    pauses = Pauses()
    config: Any = {"retries": 7, "backoff": 1.0, "max_backoff": 4.0}
    async with answering(says({"message": "full"}, status=503), sleep=pauses, **config) as calls:
        with pytest.raises(EngineError, match="full after 8 attempts") as raised:
            await calls.generate(request())
    assert (raised.value.status, raised.value.attempts) == (503, 8)
    assert len(pauses) == 7
    for pause, middle in zip(pauses, [1, 2, 4, 4, 4, 4, 4], strict=True):
        assert middle * 0.5 <= pause <= middle * 1.5
    assert len(set(pauses)) == 7


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("7", 7.0, 7.0), ("9999", 60.0, 60.0), ("soon", 0.0, 0.4), ("-3", 0.0, 0.4)],
)
async def test_retry_after_is_waited(header: str, least: float, most: float) -> None:
    _, handle = flaky(refusal(429, {}, **{"Retry-After": header}), completion([3]))
    pauses = Pauses()
    async with answering(handle, sleep=pauses, backoff=0.25) as calls:
        await calls.generate(request())
    assert len(pauses) == 1 and least <= pauses[0] <= most


async def test_an_internal_error_gets_one_more_attempt_only() -> None:
    seen, handle = flaky(refusal(500, b"Internal Server Error"))
    async with answering(handle, retries=5) as calls:
        with pytest.raises(EngineError, match="Internal Server Error after 2 attempts"):
            await calls.generate(request())
    assert len(seen) == 2


async def test_the_deadline_ends_the_attempts() -> None:
    seen, handle = flaky(refusal(503, {"message": "full"}))
    async with answering(handle, deadline=5.0, backoff=100.0, max_backoff=100.0) as calls:
        with pytest.raises(EngineError, match="full"):
            await calls.generate(request())
    assert len(seen) == 1


OVERFLOWS = {
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).": (
        5000,
        4096,
    ),
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
    "requested a total of 4103 tokens: 4095 tokens from the input messages and 8 tokens for the "
    "completion.": (4095, 4088),
    "Input length (3000 tokens) exceeds the maximum allowed length (2994 tokens). Use a shorter "
    "input or enable --allow-auto-truncate.": (3000, 2994),
}


@pytest.mark.parametrize("message", [*OVERFLOWS, "1 validation error: x"])
async def test_a_400_is_not_tried_again(message: str) -> None:
    body = {"object": "error", "message": message, "type": "Bad Request", "code": 400}
    seen, handle = flaky(refusal(400, body))
    async with answering(handle) as calls:
        with pytest.raises(EngineError, match=calls.url) as raised:
            await calls.generate(request())
    assert len(seen) == 1
    assert isinstance(raised.value, ContextOverflowError) is (message in OVERFLOWS)
    assert message in str(raised.value)
    assert (raised.value.status, orjson.loads(raised.value.body)) == (400, body)


async def test_a_list_of_one_answer_is_that_answer() -> None:
    async with answering(says([completion([3, 4])])) as calls:
        assert (await calls.generate(request())).output_ids.tolist() == [3, 4]


# --- what is left behind at the engine: nothing ---------------------------------------------------


async def test_an_abandoned_request_is_aborted_first(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang notices a client that has left only seconds later."""
    order: list[tuple[str, str]] = []
    arrived = asyncio.Event()

    async def handle(http: web.Request) -> web.StreamResponse:
        order.append((http.path, orjson.loads(await http.read())["rid"]))
        if len(order) == 1:
            arrived.set()
            await asyncio.Event().wait()
        return web.json_response(completion([3]))

    routes: dict[str, Any] = {"/generate": handle, "/abort_request": handle}
    async with client_of(routes, attempt_timeout=600) as calls:
        task = asyncio.create_task(calls.generate(request()))
        await arrived.wait()
        skip(601)
        answer = await task
    assert (answer.attempts, answer.output_ids.tolist()) == (2, [3])
    assert [path for path, _ in order] == ["/generate", "/abort_request", "/generate"]
    assert order[0][1] == order[1][1] != order[2][1]
    [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"request {order[0][1]} of session s is aborted: no answer" in line


async def test_a_cancelled_call_is_aborted_at_the_engine_and_no_other(tokenizer: Any) -> None:
    """`abort_all` ends the requests of its client alone."""
    hold = asyncio.Event()
    held = Reply("one two three", hold=hold, hold_after=2)
    async with (
        embedded(tokenizer, lambda seen: held) as (engine, calls),
        client(engine.url) as other,
    ):
        names = ("doomed", "mine1", "mine2", "mine3")
        doomed, *mine = (
            asyncio.create_task(calls.generate(request(session=name))) for name in names
        )
        others = asyncio.create_task(other.generate(request(session="other")))
        await engine.until(lambda e: e.held == 5)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await asyncio.wait_for(engine.until(lambda e: any(x.aborted for x in e.log)), PATIENCE)
        assert [x.routing_key for x in engine.log if x.aborted] == ["doomed"]
        await calls.abort_all()
        answers = await asyncio.gather(*mine)
        assert calls._in_flight == set()
        hold.set()
        assert (await others).finish_reason == "stop"
    assert [answer.finish_reason for answer in answers] == ["abort"] * 3
    assert all(len(answer.output_ids) == 2 == len(answer.logprobs) for answer in answers)  # type: ignore[arg-type]
    aborted = {entry.routing_key: entry.aborted for entry in engine.log}
    assert aborted == {**dict.fromkeys(names, True), "other": False}


async def test_an_abort_reaches_every_worker_behind_a_router() -> None:
    """Routers answer 404 to /abort_request."""
    rids, arrived = list[str](), asyncio.Event()

    async def generate(http: web.Request) -> web.StreamResponse:
        rids.append(orjson.loads(await http.read())["rid"])
        arrived.set()
        await asyncio.Event().wait()
        return web.Response()

    (at_first, one), (at_second, two) = flaky({}), flaky({})
    async with (
        http_server({"/abort_request": one}) as first,
        http_server({"/abort_request": two}) as second,
    ):
        listed = {"workers": [{"url": first, "id": "1"}, {"url": second}, {"id": "none"}]}
        routes = {"/generate": generate, "/workers": says(listed)}
        async with client_of(routes) as calls:
            task = asyncio.create_task(calls.generate(request()))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    aborted = [[body["rid"] for body in seen] for seen in (at_first, at_second)]
    assert aborted == [rids] * 2 and len(rids) == 1


async def test_an_abort_that_fails_is_no_error(gone: str, caplog: Any) -> None:
    """One that is refused is logged."""
    async with client_of({"/workers": says([{"url": gone}])}, abort_timeout=2.0) as calls:
        await calls.abort("r")
    async with client_of({"/abort_request": says({"message": "no"}, status=400)}) as calls:
        await calls.abort("r1")
    assert "/abort_request answers 400 to {'rid': 'r1'}" in caplog.text


# --- sampling parameters, facts and failures ------------------------------------------------------


@given(
    context=st.none() | st.integers(1, 500),
    pool=st.none() | st.integers(1, 500),
    wanted=st.none() | st.integers(0, 500),
    prompt=st.integers(0, 600),
)
@example(context=100, pool=None, wanted=7, prompt=100)
@example(context=100, pool=50, wanted=None, prompt=51)
@example(context=40, pool=50, wanted=None, prompt=60)
def test_what_is_asked_for_always_fits(
    context: int | None, pool: int | None, wanted: int | None, prompt: int
) -> None:
    info = ModelInfo(context_length=context, max_input_length=pool)
    given_params = {"temperature": 0.5} | ({} if wanted is None else {"max_new_tokens": wanted})
    limits = [limit for limit in (context and context - 1, pool) if limit is not None]
    if limits and prompt > min(limits):
        words = f"^prompt is too long: {prompt} tokens > {min(limits)} maximum"
        with pytest.raises(ContextOverflowError, match=words):
            effective_params(given_params, prompt, info)
        return
    params = effective_params(given_params, prompt, info)
    asked = DEFAULT_MAX_NEW_TOKENS if wanted is None else wanted
    assert params == {
        "temperature": 0.5,
        "max_new_tokens": asked if context is None else min(asked, context - prompt),
    }
    assert context is None or prompt + params["max_new_tokens"] <= context
    assert given_params.get("max_new_tokens") == wanted, "the caller's dict is its own"


def test_an_unknown_name_is_sent_unless_a_router_drops_it() -> None:
    """Every router drops the names that it does not know."""
    assert check_params(dict.fromkeys(KNOWN)) == check_params({"n": 1}) == set()
    assert check_params({"bogus": 1, "top_k": 5}) == {"bogus"}
    assert check_params({"stop": "x", "lora_path": "y", "bogus": "z"}) == {"bogus"}
    with pytest.raises(UsageError, match="the router silently drops the sampling parameter 'bogu"):
        check_dropped({"bogus": 1}, DROPPED_BY_SMG)
    for wrong, words in (
        ({"max_tokens": 1}, "'max_tokens'; did you mean 'max_new_tokens'"),
        ({"temperature": "0.5"}, r"parameter temperature cannot be the text '0\.5'"),
        ({"n": 2}, "^n=2: a turn is one answer"),
    ):
        with pytest.raises(UsageError, match=words):
            check_params(wrong)


def test_facts_are_read_where_they_stand() -> None:
    info, server = {"weight_version": "w"}, {"max_req_input_len": 90, "model_path": "p"}
    models = {"data": [{"max_model_len": 4096}]}
    assert read_model_info(info, server, models) == ModelInfo(4096, None, "w", "p", 89)
    server = {"context_length": 5, "weight_version": "s"}
    assert read_model_info({}, server, {"data": []}) == ModelInfo(5, None, "s")
    assert read_model_info({}, {}, {}) == ModelInfo()
    for value in (True, 0, -1, "4096", None, 3.5):  # no context length: it is unknown
        wrong = {"data": [{"max_model_len": value}]}
        assert read_model_info({}, {"context_length": value}, wrong).context_length is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"m"}}', "m"),
        (b'{"error":"e"}', "e"),
        (b'{"error":{"type":"t","code":"no_available_workers"}}', "no_available_workers"),
        (b'{"error":{"type":"t"}}', '{"type":"t"}'),
        (b"[1]", "[1]"),
        (b" Bad Gateway \n", "Bad Gateway"),
        (b"", "HTTP 502"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_the_words_of_a_refusal(body: bytes, words: str) -> None:
    assert from_response(502, body).message == words


@given(status=st.integers(201, 599), text=st.text(max_size=30))
@example(status=502, text="bad gateway")
def test_only_what_can_succeed_is_tried_again(status: int, text: str) -> None:
    failure = from_response(status, text.encode())
    assert failure.retry == (status in (408, 425, 429, 502, 503, 504))
    assert failure.server_fault == (status == 500)
    # else a request that kills each engine behind a gateway is sent forever
    assert failure.lost == failure.running == (status == 502)
    assert not failure.overflow and failure.status == status and failure.body == text


def test_an_overflow_is_a_400_only() -> None:
    for message, sizes in OVERFLOWS.items():
        body = orjson.dumps({"error": {"message": message}})
        assert from_response(400, body).overflow == sizes
        assert from_response(503, body).overflow is None
    failure = from_exception(ConnectionResetError())
    assert failure.retry and failure.status is None and "ConnectionResetError" in failure.message
