"""Trainers that record an agent's chat completions: what they read of the endpoint's replies."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from support.endpoints import Bench, endpoint

from toolroll.testing import load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}
LINES = ["I look.", "Found it.", "Bye."]


def snippet(name: str) -> Any:
    """The function `name` of the page on trainers."""
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    (code,) = [block for block in blocks if f"def {name}(" in block]
    found: dict[str, Any] = {}
    exec(code, found)
    return found[name]


async def talk(client: Any) -> list[Any]:
    messages: list[Any] = [USER]
    replies = []
    for _ in LINES:
        reply = await client.chat.completions.create(model="default", messages=messages)
        replies.append(reply)
        text = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, USER]
    await client.close()
    return replies


def exact(bench: Bench, session: str, recorded: list[tuple[list[int], list[int]]]) -> None:
    """The recorded ids are what the engine got and sampled, and one sequence."""
    assert recorded == [(one.input_ids.tolist(), one.output_ids) for one in bench.engine.log]
    (trajectory,) = bench.endpoint.sessions.find(session).session.trajectories()
    prompt, sampled = recorded[-1]
    assert prompt + sampled == trajectory.input_ids.tolist()


async def test_rllm_s_gateway_records_the_tokens() -> None:
    """Its own server, with the endpoint as its worker."""
    server = pytest.importorskip("rllm_model_gateway.server", reason="needs rllm-model-gateway")
    models = pytest.importorskip("rllm_model_gateway.models")
    uvicorn = pytest.importorskip("uvicorn")
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
        port = own.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        await talk(snippet("client_of")(url, "one"))
        async with bench.http.get(f"{url}/sessions/one/traces") as response:
            traces = await response.json()
        own.should_exit = True
        await running
        recorded = [(one["prompt_token_ids"], one["completion_token_ids"]) for one in traces]
        exact(bench, "one", recorded)
        assert [one["logprobs"] for one in traces] == [
            pytest.approx(list(one.logprobs)) for one in bench.engine.log
        ]
