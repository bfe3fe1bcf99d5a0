"""Whole episodes in each dialect by unmodified clients of other projects; the trajectories are
judged by the engine's own log.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import agents
import pytest
from support.anthropic_wire import LOOK
from support.client_scenario import FIRST, SAID, one_episode, play, saying, seen
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.listed_environment import TOOL
from support.qwen import tokenizer_for, trl_template

STREAMED = pytest.mark.parametrize("stream", [False, True])
SYSTEM, ASKED = FIRST[0]["content"], FIRST[1]["content"]
LAST = "All seen: <b>x</b>."
PATHS = {"openai": "/v1", "anthropic": ""}


@pytest.fixture(scope="module")
def qwen3() -> Any:
    """A tokenizer whose template strips thoughts and groups tool results."""
    return tokenizer_for(trl_template("qwen3"))


async def judged(bench: Bench) -> None:
    """One exact trajectory, without a fork."""
    await one_episode(bench)
    assert (await bench.get("/sessions/s/trajectories"))["forks"] == []


# --- litellm --------------------------------------------------------------------------------------


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, kept from fetching its price list."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    return litellm


@pytest.mark.parametrize(
    ("provider", "stream"),
    [("hosted_vllm", False), *((name, on) for name in PATHS for on in (False, True))],
)
async def test_litellm(litellm: Any, qwen3: Any, provider: str, stream: bool) -> None:
    """Chat completions, and Messages for the provider anthropic."""
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    async with endpoint(qwen3, saying, split="random") as bench:
        base = f"{bench.url}/sessions/s{PATHS.get(provider, '/v1')}"

        async def create(*, model: str, **asked: Any) -> Any:
            reply = await litellm.acompletion(
                model=f"{provider}/{model}", api_base=base, api_key="unused", stream=stream,
                max_tokens=1000, temperature=0.7, **options, **asked,
            )  # fmt: skip
            if not stream:
                return reply
            chunks = [chunk async for chunk in reply]
            return litellm.stream_chunk_builder(chunks, messages=asked["messages"])

        assert (await play(create)).content == LAST
        await judged(bench)


@STREAMED
async def test_litellm_over_responses(litellm: Any, qwen3: Any, stream: bool) -> None:
    async with endpoint(qwen3, saying, split="random") as bench:
        items: list[Any] = [{"role": "user", "content": ASKED}]
        tool = {"type": "function", **TOOL["function"]}
        while True:
            reply = await litellm.aresponses(
                model="openai/m",
                api_base=f"{bench.url}/sessions/s/v1",
                api_key="unused",
                instructions=SYSTEM,
                input=items,
                tools=[tool],
                stream=stream,
            )
            if stream:
                events = [event async for event in reply]
                reply = events[-1].response
            output = [
                item if isinstance(item, dict) else item.model_dump() for item in reply.output
            ]
            calls = [item for item in output if item["type"] == "function_call"]
            if not calls:
                break
            items += output
            items += [
                {
                    "type": "function_call_output",
                    "call_id": item["call_id"],
                    "output": seen(item["arguments"]),
                }
                for item in calls
            ]
        assert len(bench.engine.log) == len(SAID)
        assert output[-1]["content"][0]["text"] == LAST
        await judged(bench)


# --- openai-agents --------------------------------------------------------------------------------


def looker(**more: Any) -> Any:
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def look(at: str) -> str:
        """Look at something."""
        return seen(json.dumps({"at": at}))

    return agents.Agent(name="looker", instructions=SYSTEM, tools=[look], model="m", **more)


async def answer_of(bench: Bench, agent: Any, *, responses: bool, stream: bool = False) -> Any:
    provider = agents.OpenAIProvider(openai_client=bench.client(), use_responses=responses)
    config = agents.RunConfig(model_provider=provider)
    if not stream:
        return (await agents.Runner.run(agent, ASKED, run_config=config)).final_output
    run = agents.Runner.run_streamed(agent, ASKED, run_config=config)
    async for _ in run.stream_events():
        pass
    return run.final_output


@STREAMED
@pytest.mark.parametrize("responses", [False, True])
async def test_openai_agents(qwen3: Any, responses: bool, stream: bool) -> None:
    async with endpoint(qwen3, saying, split="random") as bench:
        assert await answer_of(bench, looker(), responses=responses, stream=stream) == LAST
        await judged(bench)


async def test_openai_agents_with_a_handoff_is_two_roots(qwen3: Any) -> None:
    """Two agents with instructions and tools of their own, in one session: nothing is trained
    twice, nothing is lost.
    """
    said = [call("transfer_to_looker"), *SAID]
    async with endpoint(qwen3, lambda request: said[request.call], split="random") as bench:
        boss = agents.Agent(
            name="boss", instructions="Hand everything over.", model="m", handoffs=[looker()]
        )
        assert await answer_of(bench, boss, responses=False) == LAST
        turns = [turn for found in await bench.trajectories() for turn in found["turns"]]
        assert sum(turn["excluded"] is None for turn in turns) == 4


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


# --- anthropic ------------------------------------------------------------------------------------


@STREAMED
async def test_the_anthropic_sdk(qwen3: Any, stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with endpoint(qwen3, saying, split="random") as bench:
        client = anthropic.AsyncAnthropic(
            base_url=f"{bench.url}/sessions/s", api_key="unused", max_retries=0
        )
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        while True:
            asked = {"model": "m", "system": SYSTEM, "messages": messages, "tools": [LOOK]}
            counted = await client.messages.count_tokens(**asked)
            if stream:
                async with client.messages.stream(max_tokens=1000, **asked) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(max_tokens=1000, **asked)
            read = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
            assert read == counted.input_tokens == len(bench.engine.log[-1].input_ids)
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": seen(json.dumps(block.input)),
                }
                for block in reply.content
                if block.type == "tool_use"
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})
        assert reply.content[-1].text == LAST
        await client.close()
        await judged(bench)


async def test_the_anthropic_sdk_gets_typed_errors(qwen3: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with endpoint(qwen3, saying) as bench:
        client = anthropic.AsyncAnthropic(base_url=bench.url, api_key="unused", max_retries=0)
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(
                model="m",
                max_tokens=5,
                messages=[{"role": "user", "content": "Hi"}],
                tools=[{"type": "web_search_20250305", "name": "web_search"}],
            )
        assert caught.value.body["error"]["param"] == "tools[0].type"
        await client.close()
