"""Whole episodes through the endpoint by real, unmodified clients; the trajectories are judged by the engine's own log."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, InternalServerError, OpenAI
from support.endpoints import endpoint
from support.looking import FIRST, SAID, one_episode, play, saying, seen
from support.qwen import tokenizer_for, trl_template
from support.worlds import TOOL

from toolroll.rollout.testing import Fault, Reply, load_embedded_tokenizer

SMALL = pytest.mark.parametrize("any_tokenizer", ["embedded"], indirect=True)
"""For what does not depend on the tokenizer."""


@pytest.fixture(params=["embedded", "qwen3"], scope="module")
def any_tokenizer(request: pytest.FixtureRequest) -> Any:
    """The embedded tokenizer, and one with Qwen3's template, which strips thoughts and groups tool results."""
    return load_embedded_tokenizer() if request.param == "embedded" else tokenizer_for(trl_template("qwen3"))


# --- openai --------------------------------------------------------------------------------------------------------------


async def test_openai_async(any_tokenizer: Any) -> None:
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        last = await play(bench.client().chat.completions.create)
        assert (last.content, last.reasoning_content) == ("All seen: <b>x</b>.", "What now?")
        await one_episode(bench)


@SMALL
async def test_openai_sync(any_tokenizer: Any) -> None:
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        with OpenAI(base_url=f"{bench.url}/sessions/s/v1", api_key="unused") as client:
            await play(lambda **asked: asyncio.to_thread(client.chat.completions.create, **asked))
        await one_episode(bench)


async def test_openai_streaming(any_tokenizer: Any) -> None:
    """`chat.completions.stream`, which puts the deltas together itself."""
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        client = bench.client()

        async def create(**asked: Any) -> Any:
            async with client.chat.completions.stream(**asked) as stream:
                return await stream.get_final_completion()

        last = await play(create, stream_options={"include_usage": True})
        assert last.content == "All seen: <b>x</b>."
        await one_episode(bench)


async def test_openai_sync_streaming_delta_by_delta(any_tokenizer: Any) -> None:
    """Raw chunks, put together as programs do it by hand."""
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        with OpenAI(base_url=f"{bench.url}/sessions/s/v1", api_key="unused") as client:

            def ask(messages: list[Any]) -> dict[str, Any]:
                content, calls, finish = "", dict[int, dict[str, str]](), None
                for chunk in client.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True):  # type: ignore[list-item]
                    delta = chunk.choices[0].delta
                    content += delta.content or ""
                    for part in delta.tool_calls or ():
                        entry = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                        entry["id"] += part.id or ""
                        assert part.function is not None
                        entry["name"] += part.function.name or ""
                        entry["arguments"] += part.function.arguments or ""
                    finish = chunk.choices[0].finish_reason or finish
                assert finish == ("tool_calls" if calls else "stop")
                made = [
                    {"id": it["id"], "type": "function", "function": {"name": it["name"], "arguments": it["arguments"]}}
                    for it in calls.values()
                ]
                return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}

            messages = list(FIRST)
            for _ in SAID:
                messages.append(await asyncio.to_thread(ask, messages))
                for wanted in messages[-1].get("tool_calls", ()):
                    answer = seen(wanted["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": wanted["id"], "content": answer})
        await one_episode(bench)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_retries_what_the_engine_refused(stream: bool) -> None:
    """The engine fails as often as its client tries; the SDK's own retry then succeeds, and all is there once."""
    down = Fault(status=503, body=b'{"error":"overloaded"}')
    plan = lambda request: down if request.index in (1, 2, 4, 5) else None
    async with endpoint(load_embedded_tokenizer(), saying, faults=plan, config={"attempts": 2}) as bench:
        client = bench.client(max_retries=2)

        async def create(**asked: Any) -> Any:
            if not stream:
                return await client.chat.completions.create(**asked)
            async with client.chat.completions.stream(**asked) as events:
                return await events.get_final_completion()

        await play(create)
        await one_episode(bench)
        assert len(bench.engine.log) == 3 + 4


@SMALL
async def test_openai_without_retries_gets_the_error(any_tokenizer: Any) -> None:
    plan = lambda request: Fault(status=503, body=b'{"error":"overloaded"}')
    async with endpoint(any_tokenizer, saying, faults=plan, config={"attempts": 1}) as bench:
        with pytest.raises(InternalServerError) as caught:
            await bench.client(max_retries=0).chat.completions.create(model="m", messages=FIRST)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_overloaded")
        assert await bench.trajectories() == []


@SMALL
async def test_openai_times_out_retries_and_joins_its_own_request(any_tokenizer: Any) -> None:
    """The SDK hangs up at its time-out and asks again: the same request goes on, and is sampled once."""
    release = asyncio.Event()
    hold = lambda request: Reply(saying(request), hold=release, hold_after=2) if request.call == 1 else saying(request)
    async with endpoint(any_tokenizer, hold) as bench:
        client = bench.client(max_retries=20, timeout=1.0)
        playing = asyncio.create_task(play(client.chat.completions.create))
        await bench.engine.until(lambda engine: engine.held == 1)
        await bench.joined("s", retry=1)
        release.set()
        await playing
        await one_episode(bench)
        assert len(bench.engine.log) == 3


@SMALL
@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_without_a_retry_is_aborted_at_the_engine(any_tokenizer: Any, stream: bool) -> None:
    hold = lambda request: Reply(saying(request), hold=asyncio.Event(), hold_after=2)
    async with endpoint(any_tokenizer, hold, settings={"grace": 0.05}) as bench:

        async def ask() -> None:
            if stream:
                async for _ in await bench.client().chat.completions.create(model="m", messages=FIRST, stream=True):
                    pass
            await bench.client().chat.completions.create(model="m", messages=FIRST)

        asking = asyncio.create_task(ask())
        await bench.engine.until(lambda engine: engine.held == 1)
        asking.cancel()
        await bench.engine.until(lambda engine: engine.log[0].finished is not None)
        assert bench.engine.log[0].aborted
        assert await bench.trajectories() == []


@SMALL
async def test_many_sessions_at_the_same_time(any_tokenizer: Any) -> None:
    async with endpoint(any_tokenizer, saying, split="random", token_latency=0.0005) as bench:
        names = [f"session-{at}" for at in range(16)]
        await asyncio.gather(*(play(bench.client(name).chat.completions.create) for name in names))
        for name in names:
            await one_episode(bench, name)


# --- litellm -------------------------------------------------------------------------------------------------------------


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
            return await litellm.acompletion(model=f"{provider}/{model}", api_base=base, api_key="unused", **asked)

        last = await play(create, temperature=0.7)
        assert last.content == "All seen: <b>x</b>."
        await one_episode(bench)


@SMALL
async def test_litellm_streaming(litellm: Any, any_tokenizer: Any) -> None:
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        base = f"{bench.url}/sessions/s/v1"

        async def create(*, model: str, **asked: Any) -> Any:
            stream = await litellm.acompletion(
                model=f"openai/{model}", api_base=base, api_key="unused", stream=True, stream_options={"include_usage": True}, **asked
            )
            return litellm.stream_chunk_builder([chunk async for chunk in stream], messages=asked["messages"])

        await play(create)
        await one_episode(bench)


# --- openai-agents -------------------------------------------------------------------------------------------------------


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
    """Two agents with instructions and tools of their own, in one session: nothing is trained twice, nothing is lost."""
    import agents

    said = ["<tool_call>" + json.dumps({"name": "transfer_to_looker", "arguments": {}}) + "</tool_call>", *SAID]
    async with endpoint(any_tokenizer, lambda request: said[request.call], split="random") as bench:
        client = bench.client()
        model = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
        boss = agents.Agent(name="boss", instructions="Hand everything over.", model=model, handoffs=[an_agent(client)])
        result = await agents.Runner.run(boss, FIRST[1]["content"])
        assert result.final_output == "All seen: <b>x</b>."
        trajectories = await bench.trajectories()
        assert sum(turn["excluded"] is None for found in trajectories for turn in found["turns"]) == 4


# --- tau-bench -----------------------------------------------------------------------------------------------------------


@pytest.mark.peers
@SMALL
async def test_tau_benchs_own_agent(litellm: Any, any_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """tau-bench's `ToolCallingAgent`, as it is, in its own environment."""
    from support.tau import REAL, needed

    needed(REAL)
    from tau_bench.agents.tool_calling_agent import ToolCallingAgent  # type: ignore[import-not-found]

    env = REAL.stock_env("retail", "test", 0)
    wanted = list(env.tasks[0].actions)
    said = ["<tool_call>" + json.dumps({"name": it.name, "arguments": it.kwargs}) + "</tool_call>" for it in wanted] + ["Goodbye."]
    async with endpoint(any_tokenizer, lambda request: said[request.call], split="random") as bench:
        monkeypatch.setenv("OPENAI_API_BASE", f"{bench.url}/sessions/s/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "unused")
        agent = ToolCallingAgent(env.tools_info, env.wiki, model="m", provider="openai", temperature=0.0)
        result = await asyncio.to_thread(agent.solve, env, 0)
        assert result.reward == 1.0
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == len(said)
