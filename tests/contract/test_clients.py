"""Clients of other projects, unmodified, play whole episodes on the endpoint: some of those of
`make test-clients`, litellm, tau-bench, and a trainer's gateway that records them. The trajectories
are judged by the engine's own log.
"""

import asyncio
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clients.play import PROGRAMS
from clients.play import play as play_program
from clients.table import CLIENTS, Dialect
from support.client_scenario import one_episode, play, saying
from support.endpoints import endpoint
from support.episodes import call
from support.qwen import tokenizer_for, trl_template

from toolroll.testing import Fault, load_embedded_tokenizer

PLAYED: list[tuple[str, Dialect, bool]] = [
    ("langgraph", "chat", False),
    ("langgraph", "responses", True),
    ("langgraph", "messages", False),
    ("pydantic-ai", "chat", True),
    ("pydantic-ai", "responses", False),
    ("pydantic-ai", "messages", True),
    ("haystack", "chat", False),
    ("OpenAI", "chat", False),
    ("OpenAI", "responses", True),
    ("instructor", "messages", False),
]
"""The clients' names without their versions; True for a streamed answer."""


@pytest.mark.parametrize(("name", "dialect", "stream"), PLAYED)
async def test_clients_have_exact_trajectories(name: str, dialect: Dialect, stream: bool) -> None:
    [client] = [one for one in CLIENTS if one.name.split()[0] == name]
    command: list[str | Path] = [sys.executable, PROGRAMS / client.program]
    played = await play_program(client, dialect, command, stream=stream)
    assert played.differences(client.expected[dialect]) == []


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
        assert last.content == "All seen: <b>x</b>."
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
async def test_tau_benchs_agent(litellm: Any, qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- rLLM's gateway -------------------------------------------------------------------------------

LINES = ["I look.", "Found it.", "Bye."]


async def test_rllm_s_gateway_records_the_tokens() -> None:
    """Its own server, with the endpoint as its worker, and the client of docs/trainers.md."""
    server = pytest.importorskip("rllm_model_gateway.server", reason="needs rllm-model-gateway")
    models = pytest.importorskip("rllm_model_gateway.models")
    uvicorn = pytest.importorskip("uvicorn")
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    (code,) = [block for block in blocks if "def client_of(" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    async with endpoint(load_embedded_tokenizer(), lambda it: LINES[it.index % 3]) as bench:
        config = models.GatewayConfig(
            workers=[models.WorkerConfig(url=f"{bench.url}/v1")],
            store_worker="memory",
            add_return_token_ids=False,  # 0.1.0 asks with a field extra_body, which is refused
            sync_traces=True,
        )
        own = uvicorn.Server(
            uvicorn.Config(server.create_app(config), host="127.0.0.1", port=0, log_level="warning")
        )
        running = asyncio.create_task(own.serve())
        while not own.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{own.servers[0].sockets[0].getsockname()[1]}"
        user = {"role": "user", "content": "Hi"}
        messages: list[Any] = [user]
        async with names["client_of"](url, "one") as client:
            for line in LINES:
                await client.chat.completions.create(model="default", messages=messages)
                messages += [{"role": "assistant", "content": line}, user]
        async with bench.http.get(f"{url}/sessions/one/traces") as response:
            traces = await response.json()
        own.should_exit = True
        await running
        recorded = [(turn["prompt_token_ids"], turn["completion_token_ids"]) for turn in traces]
        log = bench.engine.log
        assert recorded == [(entry.input_ids.tolist(), entry.output_ids) for entry in log]
        (trajectory,) = bench.endpoint.sessions.find("one").session.trajectories()
        prompt, sampled = recorded[-1]
        assert prompt + sampled == trajectory.input_ids.tolist()
        logprobs = [pytest.approx(list(entry.logprobs)) for entry in log]
        assert [turn["logprobs"] for turn in traces] == logprobs
