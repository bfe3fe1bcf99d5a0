"""An endpoint over an embedded engine, its clients, and the judge of its trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.lib.streaming.chat import ChatCompletionStreamState
from support.episodes import serving

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
    requests = [
        entry
        for entry in engine.log
        if entry.routing_key == session and entry.status == 200 and entry.output_ids
    ]
    used = [False] * len(requests)
    for trajectory in trajectories:
        ids, mask = np.array(trajectory["input_ids"]), np.array(trajectory["loss_mask"])
        expected = np.zeros(len(ids), dtype=np.int64)
        sampled = np.zeros(len(ids), dtype=bool)
        for turn in trajectory["turns"]:
            start, stop = turn["start"], turn["stop"]
            sampled[start:stop] = True
            fits = [
                at
                for at, entry in enumerate(requests)
                if _is(entry, ids, start, stop, trajectory["logprobs"])
            ]
            assert fits, "a turn's prompt and sampled ids were never served together"
            if turn["excluded"] is not None:
                continue
            free = [at for at in fits if not used[at]]
            assert free, "a sampled turn is trained twice"
            used[free[0]] = True
            expected[start:stop] = 1
        assert np.array_equal(mask, expected)
        missing = [value is None for value in trajectory["logprobs"]]
        assert missing == (~sampled).tolist()
    nowhere = used.count(False)
    assert nowhere == refused, f"{nowhere} sampled turns are trained nowhere, expected {refused}"
    assert engine.killed == 0


def _is(entry: Any, ids: Any, start: int, stop: int, logprobs: list[float | None]) -> bool:
    served, own = (np.array(each, np.float32) for each in (entry.logprobs, logprobs[start:stop]))
    return (
        np.array_equal(entry.input_ids, ids[:start])
        and np.array_equal(entry.output_ids, ids[start:stop])
        and np.array_equal(served, own)
    )


async def streamed(client: AsyncOpenAI, **asked: Any) -> Any:
    """Stream an answer and return it whole, as the SDK puts it together.

    `client.chat.completions.stream` does the same, but openai 2 refuses tools that are not strict.
    """
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        state.handle_chunk(chunk)
    return state.get_final_completion()
