"""The verifiers adapter with a mirror of the classes that it extends (verifiers 0.4.0);
tests/contract/test_verifiers.py has the real ones.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from support.standins import stand_in, stands_for

from toolroll.rollout.errors import UsageError
from toolroll.trainers.verifiers import EndpointClient, register

RAW: dict[str, Any] = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "token_ids": [3],
            "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}]},
            "finish_reason": "stop",
        }
    ],
}


NO_LOGPROB = {"content": [{"token_id": 3, "logprob": None}]}


@stands_for("verifiers.v1.errors:ProviderError")
class ProviderError(Exception):
    def __init__(self, message: str = "", *, status_code: int = 502) -> None:
        super().__init__(f"{status_code}: {message}")


@stands_for("verifiers.v1.errors:model_error")
def model_error(e: object, *, status_code: int | None = None) -> ProviderError:
    return ProviderError(str(e), status_code=status_code or 502)


@stands_for("verifiers.v1.clients:TrainClientConfig")
class TrainClientConfig(BaseModel):
    base_url: str


CONFIG = TrainClientConfig(base_url="http://e/v1")


@stands_for("verifiers.v1.types:TurnTokens")
class TurnTokens(BaseModel):
    prompt_ids: list[int] = []
    completion_ids: list[int] = []
    completion_logprobs: list[float] = []


@stands_for("verifiers.v1.clients.eval:EvalClient", own="raw requests")
class EvalClient:
    def __init__(self, config: Any) -> None:
        self.raw = RAW
        self.requests: list[Any] = []

    async def get_response(
        self,
        dialect: Any,
        body: Any,
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Any = None,
    ) -> Any:
        self.requests.append((body, session_id))
        return SimpleNamespace(raw=self.raw, tokens=None)

    async def close(self) -> None:
        self.raw = {}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> EndpointClient:
    """A client over the mirror."""
    mirror: dict[str, dict[str, Any]] = {
        "verifiers": {},
        "verifiers.v1": {},
        "verifiers.v1.clients": {},
        "verifiers.v1.clients.eval": {"EvalClient": EvalClient},
        "verifiers.v1.errors": {"model_error": model_error},
        "verifiers.v1.types": {"TurnTokens": TurnTokens},
    }
    stand_in(monkeypatch, mirror)
    return EndpointClient(CONFIG)


CHAT = SimpleNamespace(upstream_path="/chat/completions")


async def test_the_tokens_of_a_turn_are_filled(client: Any) -> None:
    body = {"messages": [], "stream": True, "stream_options": {}}
    response = await client.get_response(CHAT, body, None, "session")
    assert vars(response.tokens) == {
        "prompt_ids": [1, 2],
        "completion_ids": [3],
        "completion_logprobs": [-0.5],
    }
    assert client._inner.requests == [({"messages": [], "logprobs": True}, "session")]
    assert body["stream"], "the given body was changed"


@pytest.mark.parametrize(("change", "words"), [
    ({"prompt_token_ids": None}, "422: the answer has no token ids"),
    ({"choices": [{**RAW["choices"][0], "token_ids": [4]}]}, "422: the answer has no token ids"),
    ({"choices": [{**RAW["choices"][0], "logprobs": None}]}, "422: the answer has no token ids"),
    ({"choices": [{**RAW["choices"][0], "logprobs": NO_LOGPROB}]},
     "422: a sampled token of the answer has no logprob"),
    ({"choices": [{**RAW["choices"][0], "finish_reason": "abort"}]}, "503: .* 'abort'"),
])  # fmt: skip
async def test_an_answer_that_cannot_be_trained_is_an_error(
    client: Any, change: dict[str, Any], words: str
) -> None:
    client._inner.raw = {**RAW, **change}
    with pytest.raises(ProviderError, match=words):
        await client.get_response(CHAT, {}, None)


async def test_other_dialects_and_streams_are_refused(client: Any) -> None:
    with pytest.raises(ProviderError, match="400: only chat completions"):
        await client.get_response(SimpleNamespace(upstream_path="/messages"), {}, None)
    with pytest.raises(NotImplementedError, match="TrainClientConfig"):
        await client.relay(CHAT, {})


async def test_several_answers_to_one_turn_are_refused(client: Any) -> None:
    for body, sampling in (({"n": 2}, None), ({}, SimpleNamespace(n=0))):
        with pytest.raises(ProviderError, match=r"400: n=\d is not supported"):
            await client.get_response(CHAT, body, sampling)
    assert client._inner.requests == []
    await client.get_response(CHAT, {"n": 1}, SimpleNamespace(n=None))


async def test_a_server_uses_and_closes_the_client(client: Any) -> None:
    async with AsyncExitStack() as stack:
        server = SimpleNamespace(clients={}, stack=stack)
        registered: Any = register(server, CONFIG)
        assert server.clients == {CONFIG.model_dump_json(): registered}
    assert registered._inner.raw == {}


def test_without_verifiers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.clients", "verifiers.v1.clients.eval"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install verifiers==0\.4\.0"):
        EndpointClient(CONFIG)
