"""Sampling parameters, model info and failures: what is sent, known and refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolroll.rollout.engine.errors import from_exception, from_response
from toolroll.rollout.engine.model_info import ModelInfo, read_model_info
from toolroll.rollout.engine.sampling_params import (
    DEFAULT_MAX_NEW_TOKENS,
    DROPPED_BY_SMG,
    KNOWN,
    check_params,
    effective_params,
)
from toolroll.rollout.errors import ContextOverflowError, UsageError


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
        check_params({"bogus": 1}, dropped=DROPPED_BY_SMG)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 1, "'max_tokens'; did you mean 'max_new_tokens'"),
        ("temprature", 1, "'temprature'; did you mean 'temperature'"),
        ("stops", 1, "'stops'; did you mean 'stop'"),
        ("temperature", "0.5", r"parameter temperature cannot be the text '0\.5'"),
        ("n", 2, "^n=2: a turn is one answer"),
    ],
)
def test_a_wrong_parameter_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_params({name: value})


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
        (b'{"object":"error","message":"m","code":400}', "m"),
        (b'{"error":{"type":"t","code":"no_available_workers"}}', "no_available_workers"),
        (b'{"error":{"type":"t"}}', '{"type":"t"}'),
        (b'{"detail":"d"}', '{"detail":"d"}'),
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
    message = "The input (5 tokens) is longer than the model's context length (4 tokens)."
    body = orjson.dumps({"error": {"message": message}})
    assert from_response(400, body).overflow == (5, 4)
    assert from_response(503, body).overflow is None
    failure = from_exception(ConnectionResetError())
    assert failure.retry and failure.status is None and "ConnectionResetError" in failure.message
