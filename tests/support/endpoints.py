"""An endpoint over an embedded engine, its clients, and the judge of its trajectories."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.lib.streaming.chat import ChatCompletionStreamState
from support.episodes import answers_of, serving, trained_nowhere

from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.endpoint.sessions.session_store import SessionStore, store_settings
from toolroll.rollout.model.model import Model
from toolroll.testing import EmbeddedEngine


@dataclass
class Bench:
    """What a test of the endpoint has at hand."""

    engine: EmbeddedEngine
    served: Model
    endpoint: Endpoint
    server: EndpointServer
    http: aiohttp.ClientSession
    clients: list[AsyncOpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    def client(self, session: str | None = "s", **options: Any) -> AsyncOpenAI:
        """The SDK's own client, with a session in its address."""
        path = f"/sessions/{session}/v1" if session else "/v1"
        # without certificates, which take 20 ms to load
        http = DefaultAsyncHttpxClient(verify=False)
        own: Any = {"base_url": self.url + path, "api_key": "unused", "max_retries": 0}
        client = AsyncOpenAI(**{**own, "http_client": http, **options})
        self.clients.append(client)
        return client

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as response:
            return await response.json()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def joined(self, session: str, *, retry: int) -> None:
        """Wait until a retry of this number, or a later one, has joined a request of `session`."""
        while not any(
            work.joined >= retry for work in self.endpoint.sessions.find(session).pending.all()
        ):
            await asyncio.sleep(0.01)

    async def trajectories(self, session: str = "s", *, refused: int = 0) -> list[dict[str, Any]]:
        """The session's trajectories, judged; `refused`: how many answers are trained nowhere."""
        found = (await self.get(f"/sessions/{session}/trajectories"))["trajectories"]
        judge(found, self.engine, session, refused=refused)
        return found


@asynccontextmanager
async def endpoint(
    tokenizer: Any,
    policy: Any,
    *,
    settings: dict[str, Any] | None = None,
    out: Path | None = None,
    **engine: Any,
) -> AsyncIterator[Bench]:
    """A served endpoint on a free port; `out`: the folder of its sessions."""
    async with serving(tokenizer, policy, **engine) as (embedded, served):
        store = SessionStore(out, store_settings(served, "embedded")) if out is not None else None
        core = Endpoint(
            served,
            EndpointSettings(**{"port": 0, "grace": 60.0, "verify": "always", **(settings or {})}),
            store,
        )
        async with EndpointServer(core) as server, aiohttp.ClientSession() as http:
            bench = Bench(embedded, served, core, server, http)
            yield bench
            for client in bench.clients:
                await client.close()


def judge(
    trajectories: list[dict[str, Any]], engine: EmbeddedEngine, session: str, *, refused: int = 0
) -> None:
    """I1, I2 and the logprobs of a session, by what the engine saw: each trained turn was sampled
    from exactly its prefix, once; and everything sampled is trained, but `refused` answers."""
    parts = [
        SimpleNamespace(
            input_ids=np.array(part["input_ids"]),
            loss_mask=np.array(part["loss_mask"]),
            logprobs=np.array(part["logprobs"], dtype=np.float32),  # None is NaN
            turns=[SimpleNamespace(**turn) for turn in part["turns"]],
        )
        for part in trajectories
    ]
    nowhere = trained_nowhere(parts, answers_of(engine, session))
    assert nowhere == refused, f"{nowhere} sampled turns are trained nowhere, expected {refused}"
    assert engine.killed == 0


async def streamed(client: AsyncOpenAI, **asked: Any) -> Any:
    """Stream an answer and return it whole, as the SDK puts it together.

    `client.chat.completions.stream` does the same, but openai 2 refuses tools that are not strict.
    """
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        state.handle_chunk(chunk)
    return state.get_final_completion()
