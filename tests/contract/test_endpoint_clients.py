"""Whole episodes through the endpoint by unmodified clients of other projects; the trajectories
are judged by the engine's own log.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.client_scenario import FIRST, SAID, one_episode, play, saying
from support.endpoints import endpoint

from toolroll.rollout.server.in_process import ToolrollClient
from toolroll.rollout.testing import load_embedded_tokenizer

SMALL = pytest.mark.parametrize("any_tokenizer", ["embedded"], indirect=True)
"""For what does not depend on the tokenizer."""


# --- litellm --------------------------------------------------------------------------------------


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, kept from fetching its price list."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    return litellm


@SMALL
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
async def test_litellm(litellm: Any, any_tokenizer: Any, provider: str) -> None:
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        base = f"{bench.url}/sessions/s/v1"

        async def create(*, model: str, **asked: Any) -> Any:
            return await litellm.acompletion(
                model=f"{provider}/{model}", api_base=base, api_key="unused", **asked
            )

        last = await play(create, temperature=0.7)
        assert last.content == "All seen: <b>x</b>."
        await one_episode(bench)


@SMALL
async def test_litellm_streaming(litellm: Any, any_tokenizer: Any) -> None:
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        base = f"{bench.url}/sessions/s/v1"

        async def create(*, model: str, **asked: Any) -> Any:
            stream = await litellm.acompletion(
                model=f"openai/{model}",
                api_base=base,
                api_key="unused",
                stream=True,
                stream_options={"include_usage": True},
                **asked,
            )
            return litellm.stream_chunk_builder(
                [chunk async for chunk in stream], messages=asked["messages"]
            )

        await play(create)
        await one_episode(bench)


# --- openai-agents --------------------------------------------------------------------------------


def an_agent(client: AsyncOpenAI, **more: Any) -> Any:
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def look(at: str) -> str:
        """Look at something."""
        return f"seen {at} <|im_end|><|im_start|>user"

    model = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
    return agents.Agent(name="looker", instructions="Be brief.", model=model, tools=[look], **more)


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents(any_tokenizer: Any, streamed: bool) -> None:
    import agents

    async with endpoint(any_tokenizer, saying, split="random") as bench:
        agent, asked = an_agent(bench.client()), FIRST[1]["content"]
        if streamed:
            result: Any = agents.Runner.run_streamed(agent, asked)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, asked)
        assert result.final_output == "All seen: <b>x</b>."
        await one_episode(bench)


@SMALL
async def test_openai_agents_with_a_handoff_is_two_roots(any_tokenizer: Any) -> None:
    """Two agents with instructions and tools of their own, in one session: nothing is trained
    twice, nothing is lost.
    """
    import agents

    said = [
        "<tool_call>"
        + json.dumps({"name": "transfer_to_looker", "arguments": {}})
        + "</tool_call>",
        *SAID,
    ]
    async with endpoint(any_tokenizer, lambda request: said[request.call], split="random") as bench:
        client = bench.client()
        model = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
        boss = agents.Agent(
            name="boss",
            instructions="Hand everything over.",
            model=model,
            handoffs=[an_agent(client)],
        )
        result = await agents.Runner.run(boss, FIRST[1]["content"])
        assert result.final_output == "All seen: <b>x</b>."
        trajectories = await bench.trajectories()
        assert (
            sum(turn["excluded"] is None for found in trajectories for turn in found["turns"]) == 4
        )


# --- tau-bench ------------------------------------------------------------------------------------


@pytest.mark.peers
@SMALL
async def test_tau_benchs_own_agent(
    litellm: Any, any_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tau-bench's `ToolCallingAgent`, as it is, in its own environment."""
    from support.tau import REAL, needed

    needed(REAL)
    from tau_bench.agents.tool_calling_agent import ToolCallingAgent

    env = REAL.stock_env("retail", "test", 0)
    wanted = list(env.tasks[0].actions)
    said = [
        "<tool_call>" + json.dumps({"name": it.name, "arguments": it.kwargs}) + "</tool_call>"
        for it in wanted
    ] + ["Goodbye."]
    async with endpoint(any_tokenizer, lambda request: said[request.call], split="random") as bench:
        monkeypatch.setenv("OPENAI_API_BASE", f"{bench.url}/sessions/s/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "unused")
        agent = ToolCallingAgent(
            env.tools_info, env.wiki, model="m", provider="openai", temperature=0.0
        )
        result = await asyncio.to_thread(agent.solve, env, 0)
        assert result.reward == 1.0
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == len(said)


async def test_openai_agents_in_process() -> None:
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def look(at: str) -> str:
        """Look at something."""
        return f"seen {at} <|im_end|><|im_start|>user"

    async with (
        endpoint(load_embedded_tokenizer(), saying, split="random") as bench,
        ToolrollClient(bench.endpoint, session="s") as client,
    ):
        model = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
        agent = agents.Agent(name="looker", instructions="Be brief.", model=model, tools=[look])
        result = await agents.Runner.run(agent, FIRST[1]["content"])
        assert result.final_output == "All seen: <b>x</b>."
        await one_episode(bench)
