"""Whole episodes by litellm and tau-bench, unmodified; the trajectories are judged by
the engine's own log. `test_clients.py` has more clients.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from support.client_scenario import one_episode, play, saying
from support.endpoints import endpoint
from support.episodes import call
from support.qwen import tokenizer_for, trl_template

from toolroll.testing import Fault

LAST = "All seen: <b>x</b>."


@pytest.fixture(scope="module")
def qwen3() -> Any:
    """A tokenizer whose template strips thoughts and groups tool results."""
    return tokenizer_for(trl_template("qwen3"))


# --- litellm --------------------------------------------------------------------------------------

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
DIALECTS = {
    "openai": CHAT,
    "hosted_vllm": CHAT,
    "litellm_proxy": CHAT,
    "openai/responses": RESPONSES,
    "anthropic": MESSAGES,
}
"""By litellm's name of the provider."""
LONG: Any = [{"role": "user", "content": "word " * 100}]
REFUSED = (
    b'{"error":{"message":"The input (4096 tokens) is longer than the model\'s context length '
    b'(4096 tokens)."}}'
)
"""SGLang's own answer; the endpoint's is the same error (tests/unit/server/test_refusals.py)."""


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, kept from fetching its price list."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    monkeypatch.setattr(litellm, "drop_params", True)
    return litellm


async def create(
    litellm: Any, url: str, provider: str, stream: bool, *, model: str = "m", **request: Any
) -> Any:
    path = "" if DIALECTS[provider] == MESSAGES else "/v1"
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    reply = await litellm.acompletion(
        model=f"{provider}/{model}", api_base=f"{url}{path}", api_key="unused",
        stream=stream, max_tokens=1000, temperature=0.7, max_retries=0, num_retries=0, **options,
        **request,
    )  # fmt: skip
    if not stream:
        return reply
    chunks = [chunk async for chunk in reply]
    return litellm.stream_chunk_builder(chunks, messages=request["messages"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", DIALECTS)
async def test_litellm(litellm: Any, qwen3: Any, provider: str, stream: bool) -> None:
    async with endpoint(qwen3, saying, split="random") as bench:
        url = f"{bench.url}/sessions/s"
        last = await play(partial(create, litellm, url, provider, stream))
        assert last.content == LAST
        routes = [route for _, route, _ in bench.endpoint.metrics.requests]
        assert any(route.endswith(f"/v1/{DIALECTS[provider]}") for route in routes), routes
        await one_episode(bench)
        assert (await bench.get("/sessions/s/trajectories"))["forks"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", DIALECTS)
async def test_litellm_recognizes_an_overflow(
    litellm: Any, tokenizer: Any, provider: str, stream: bool
) -> None:
    """Programs then shorten the conversation instead of sending it again."""
    faults = lambda request: Fault(status=400, body=REFUSED)
    async with endpoint(tokenizer, lambda request: "Hello.", faults=faults) as bench:
        with pytest.raises(litellm.exceptions.ContextWindowExceededError):
            await create(litellm, bench.url, provider, stream, messages=LONG)
    assert len(bench.engine.log) == 1, "the request was sent again"


# --- tau-bench ------------------------------------------------------------------------------------


@pytest.mark.peers
async def test_tau_benchs_own_agent(
    litellm: Any, qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tau-bench's `ToolCallingAgent`, as it is, in its own environment."""
    from support.tau import REAL, needed

    needed(REAL)
    from tau_bench.agents.tool_calling_agent import ToolCallingAgent

    env = REAL.stock_env("retail", "test", 0)
    wanted = list(env.tasks[0].actions)
    said = [*(call(it.name, **it.kwargs) for it in wanted), "Goodbye."]
    async with endpoint(qwen3, lambda request: said[request.call], split="random") as bench:
        monkeypatch.setenv("OPENAI_API_BASE", f"{bench.url}/sessions/s/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "unused")
        agent = ToolCallingAgent(
            env.tools_info, env.wiki, model="m", provider="openai", temperature=0.0
        )
        result = await asyncio.to_thread(agent.solve, env, 0)
        assert result.reward == 1.0
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == len(said)
