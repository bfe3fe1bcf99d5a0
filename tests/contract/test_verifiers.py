"""verifiers' own client class, dialect, trace and server, with `toolroll serve` behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from support.endpoints import endpoint, streamed
from support.experts import first_experts
from support.verifiers_parts import verifiers_parts

import toolroll.trainers.verifiers.client
from toolroll.rollout.errors import UsageError
from toolroll.testing import Fault, load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}
LINES = ["I look.", "Found it.", "Bye."]
CHAT = SimpleNamespace(upstream_path="/chat/completions")


@pytest.fixture(scope="module")
def vf() -> Iterator[Any]:
    with verifiers_parts() as parts:
        yield parts


async def test_an_agent_plays_through_verifiers_server(vf: Any) -> None:
    """An OpenAI-SDK agent, whose second turn is streamed. The trace has what was sampled."""
    async with (
        endpoint(
            load_embedded_tokenizer(), lambda request: LINES[request.index],
            faults=lambda _: Fault(evict=True), config={"return_routed_experts": True},
        ) as bench,
        vf.InterceptionServer() as server,
    ):  # fmt: skip
        config = vf.TrainClientConfig(base_url=bench.url + "/v1")
        registered = vf.register(server, config, expert_layers=2)
        trace = vf.new_trace("trace")
        session = vf.RolloutSession(vf.ModelContext("default", config), trace)
        secret, _ = server.register(session)
        assert session.client is registered and isinstance(registered, vf.Client)
        url = f"http://127.0.0.1:{server.port}/v1"
        messages = [USER]
        async with AsyncOpenAI(base_url=url, api_key=secret, max_retries=0) as agent:
            for turn, line in enumerate(LINES):
                create: Any = agent.chat.completions.create
                if turn == 1:
                    create = partial(streamed, agent)
                reply = await create(model="m", messages=messages)
                assert reply.choices[0].message.content == line
                messages += [{"role": "assistant", "content": line}, USER]
        (branch,) = trace.branches
        (ours,) = bench.endpoint.sessions.get("trace").session.trajectories()  # type: ignore[union-attr]
    assert branch.token_ids == ours.input_ids.tolist()
    assert branch.sampled_mask == ours.loss_mask.astype(bool).tolist()
    assert list(branch.logprobs) == np.nan_to_num(ours.logprobs).tolist()
    experts = branch.routed_experts  # with a placeholder for the last token
    assert experts.shape == (len(ours), 2, 2) and experts.dtype == np.uint8
    expected = first_experts(bench.engine.log, ours.input_ids)
    assert np.array_equal(experts[:-1].reshape(-1, 4), expected)
    assert np.array_equal(ours.routed_experts, expected)  # type: ignore[arg-type]


# --- answers that the test makes ------------------------------------------------------------------

CHOICE: dict[str, Any] = {
    "token_ids": [3],
    "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}]},
    "finish_reason": "stop",
}
NO_LOGPROB = {"content": [{"token_id": 3, "logprob": None}]}


class Answers:
    """Verifiers' inner client, whose answer has `choice`. `requests`: what it was asked."""

    def __init__(self, **choice: Any) -> None:
        self.prompt: Any = choice.pop("prompt", [1, 2])
        self.choice = {**CHOICE, **choice}
        self.requests: list[Any] = []
        self.closed = False

    async def get_response(
        self, dialect: Any, body: Any, sampling: Any, session_id: Any, turn: Any, headers: Any
    ) -> Any:
        self.requests.append((body, session_id))
        raw = {"prompt_token_ids": self.prompt, "choices": [self.choice]}
        return SimpleNamespace(raw=raw, tokens=None)

    async def close(self) -> None:
        self.closed = True


def client_of(vf: Any, **choice: Any) -> Any:
    client = vf.EndpointClient(vf.TrainClientConfig(base_url="http://e/v1"))
    client._inner = Answers(**choice)
    return client


async def test_the_tokens_of_a_turn_are_filled(vf: Any) -> None:
    client = client_of(vf)
    body = {"messages": [], "stream": True, "stream_options": {}, "n": 1}
    response = await client.get_response(CHAT, body, SimpleNamespace(n=None), "session")
    assert body["stream"], "the given body was changed"
    tokens = response.tokens.model_dump(exclude_unset=True)
    assert tokens == {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}
    [request] = client._inner.requests
    assert request == ({"messages": [], "logprobs": True, "n": 1}, "session")


@pytest.mark.parametrize(("choice", "words"), [
    ({"prompt": None}, "the answer has no token ids"),
    ({"token_ids": [4]}, "the answer has no token ids"),
    ({"logprobs": None}, "the answer has no token ids"),
    ({"logprobs": NO_LOGPROB}, "a sampled token of the answer has no logprob"),
    ({"finish_reason": "abort"}, "ended the turn with 'abort'"),
])  # fmt: skip
async def test_an_answer_that_cannot_be_trained_is_an_error(
    vf: Any, choice: dict[str, Any], words: str
) -> None:
    with pytest.raises(vf.ProviderError, match=words) as caught:
        await client_of(vf, **choice).get_response(CHAT, {}, None)
    assert caught.value.status_code == (503 if "finish_reason" in choice else 422)


async def test_what_has_no_token_ids_is_refused(vf: Any) -> None:
    client = client_of(vf)
    with pytest.raises(vf.ProviderError, match="only chat completions"):
        await client.get_response(vf.AnthropicDialect(), {}, None)
    for body, sampling in (({"n": 2}, None), ({}, SimpleNamespace(n=0))):
        with pytest.raises(vf.ProviderError, match=r"n=\d is not supported") as caught:
            await client.get_response(CHAT, body, sampling)
        assert caught.value.status_code == 400
    assert client._inner.requests == []
    with pytest.raises(NotImplementedError, match="TrainClientConfig"):
        await client.relay(CHAT, {})


async def test_a_server_uses_and_closes_the_client(vf: Any) -> None:
    config = vf.TrainClientConfig(base_url="http://e/v1")
    async with AsyncExitStack() as stack:
        server = SimpleNamespace(clients={}, stack=stack)
        registered = vf.register(server, config)
        assert server.clients == {config.model_dump_json(): registered}
        registered._inner = Answers()
    assert registered._inner.closed


def test_without_verifiers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.clients", "verifiers.v1.clients.eval"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install verifiers==0\.4\.0"):
        toolroll.trainers.verifiers.client.EndpointClient(None)
