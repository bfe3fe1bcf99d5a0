"""The verifiers adapter with a mirror of the classes that it extends (verifiers 0.4.0);
tests/contract/test_verifiers.py has the real ones.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from toolroll.rollout.adapters.verifiers import EndpointClient, register
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import InteractionResult, StopReason

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


class ProviderError(Exception):
    pass


@dataclass
class TrainClientConfig:
    base_url: str

    def model_dump_json(self) -> str:
        return self.base_url


CONFIG = TrainClientConfig("http://e/v1")


class EvalClient:
    def __init__(self, config: Any) -> None:
        self.raw = RAW
        self.asked: list[Any] = []

    async def get_response(self, *given: Any) -> Any:
        self.asked.append(given)
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
        "verifiers.v1.errors": {
            "model_error": lambda text, status_code: ProviderError(f"{status_code}: {text}")
        },
        "verifiers.v1.types": {"TurnTokens": SimpleNamespace},
    }
    for name, contents in mirror.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
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
    (_, asked, _, session, *_), *_ = client._inner.asked
    assert asked == {"messages": [], "logprobs": True} and session == "session"
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
    assert client._inner.asked == []
    await client.get_response(CHAT, {"n": 1}, SimpleNamespace(n=None))


async def test_a_server_uses_and_closes_the_client(client: Any) -> None:
    async with AsyncExitStack() as stack:
        server = SimpleNamespace(clients={}, stack=stack)
        made: Any = register(server, CONFIG)
        assert server.clients == {CONFIG.model_dump_json(): made}
    assert made._inner.raw == {}


def test_without_verifiers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.clients", "verifiers.v1.clients.eval"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install verifiers==0\.4\.0"):
        EndpointClient(CONFIG)


class Subscripted:
    """A generic class of verifiers."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


async def test_an_episode_that_the_engine_aborted_is_a_harness_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no error, and the message of none was read."""
    own: Any = {name: type(name, (), {}) for name in ("TaskData", "TasksetConfig", "EnvConfig")}
    own |= {"HarnessConfig": BaseModel, "AgentConfig": SimpleNamespace}
    own |= {"SubprocessConfig": SimpleNamespace, "TrainClientConfig": TrainClientConfig}
    own |= dict.fromkeys(("Task", "Taskset", "Harness", "Env"), Subscripted)
    own |= {"reward": lambda given: given, "metric": lambda given: given}
    own["HarnessError"] = type("HarnessError", (Exception,), {})
    own["ProgramResult"] = SimpleNamespace
    for name, contents in {"verifiers": {}, "verifiers.v1": own}.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["verifiers"])["v1"] = sys.modules["verifiers.v1"]
    monkeypatch.delitem(sys.modules, "toolroll_verifiers", raising=False)
    package = importlib.import_module("toolroll_verifiers")
    monkeypatch.delitem(sys.modules, "toolroll_verifiers")
    result = InteractionResult.of(
        (), messages=[], stop_reason=StopReason.ENGINE_ABORT, prompt="", reward=None, info={}
    )

    async def play(*_: Any) -> InteractionResult:
        return result

    harness = package.ToolrollHarness.__new__(package.ToolrollHarness)
    harness._play = play
    trace, data = SimpleNamespace(id="t", info={}), SimpleNamespace(name="n", index=0, seed=0)
    context = SimpleNamespace(model="m", client=None)
    with pytest.raises(own["HarnessError"], match="the episode was aborted: engine_abort"):
        await harness.launch(context, trace, None, "", "", {}, data)
    context.client = TrainClientConfig("http://other/v1")
    with pytest.raises(own["HarnessError"], match="its tokens are not exact"):
        await harness.launch(context, trace, None, "", "", {}, data)
