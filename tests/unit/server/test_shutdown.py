"""A server that stops: each answer is in its session once, or its client is told to ask again.

The next server continues the sessions, whatever their clients did meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.recorded import finished
from support.served import CHAT, TEXT, USER, ServedBench, in_session, serve

from toolroll.endpoint.replies import Reply as EndpointReply
from toolroll.testing import Reply

STOPPING = (503, "server_stopping", "true")


@dataclass
class Closing:
    """An endpoint that stops, and is held after its sessions ended and before its store closes."""

    bench: ServedBench
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        self.stopping = asyncio.create_task(self.bench.endpoint.aclose())

    async def send(self, method: str, path: str, body: Any = None) -> Any:
        """Return the status, the answer or the code of the error, and `x-should-retry`."""
        async with self.bench.http.request(method, self.bench.url + path, json=body) as response:
            answer = await response.json()
            code = answer["error"]["code"] if "error" in answer else answer
            return response.status, code, response.headers.get("x-should-retry")

    async def ask(self, session: str, messages: list[Any]) -> Any:
        return await self.send("POST", in_session(CHAT, session), {"messages": messages})


@asynccontextmanager
async def closing(policy: Any, out: Path, *, finish: bool = False) -> AsyncIterator[Closing]:
    """A server that the block stops. At the end, it has stopped."""
    async with serve(policy, out=out) as bench:
        server, store = Closing(bench), bench.store
        store.finish_at_end, close = finish, store.aclose

        async def held(*args: Any) -> None:
            server.ended.set()
            await server.go_on.wait()
            await close(*args)

        store.aclose = held  # type: ignore[assignment, method-assign]
        yield server
        server.go_on.set()
        await server.stopping


@pytest.mark.parametrize("finish", [False, True])
async def test_agents_that_ask_again_change_no_session(tmp_path: Path, finish: bool) -> None:
    names, never = [f"s{number}" for number in range(10)], asyncio.Event()
    held = Reply("Well.", hold=never, hold_after=1)
    policy = lambda request: held if request.call else "Hello."
    async with closing(policy, tmp_path, finish=finish) as server:

        async def agent(name: str) -> list[Any]:
            _, answer, _ = await server.ask(name, [USER])
            talk = [USER, answer["choices"][0]["message"], USER]
            return [await server.ask(name, talk) for _ in range(4)]

        agents = [asyncio.create_task(agent(name)) for name in names]
        await server.bench.engine.until(lambda engine: engine.held == len(names))
        server.stop()
        for answers in await asyncio.gather(*agents):
            assert answers == [STOPPING] * 4
    async with serve(policy, out=tmp_path) as again:
        lives = [(live.id, len(live.trace)) for live in again.endpoint.sessions.all()]
        assert sorted(again.store._logs) == ([] if finish else [(name, 0) for name in names])
    assert sorted(lives) == ([] if finish else [(name, 1) for name in names])
    assert sorted(finished(tmp_path)) == (names if finish else [])


async def test_every_route_of_a_session_says_that_the_server_stops(tmp_path: Path) -> None:
    async with closing("Hello.", tmp_path) as server:
        await server.ask("s", [USER])
        await server.send("POST", "/sessions/s/export")  # a finished session of that name
        await server.ask("s", [USER])
        server.stop()
        await server.ended.wait()
        for method, path, body in (
            ("POST", in_session(CHAT), {"messages": [USER]}),
            ("POST", in_session(CHAT, "new"), {"messages": [USER]}),
            ("POST", CHAT, {"messages": [USER]}),
            ("POST", in_session(TEXT), {"prompt": "Once"}),
            ("POST", "/sessions", {}),
            ("POST", "/sessions/s/reward", {"reward": 1.0}),
            ("POST", "/sessions/s/export", None),
            ("GET", "/sessions/s/trace", None),
            ("GET", "/sessions/s/trajectories", None),
            ("DELETE", "/sessions/s", None),
        ):
            assert await server.send(method, path, body) == STOPPING, path
        assert server.bench.ids() == ["s"]


async def test_an_answer_is_in_the_journal_or_its_client_gets_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer exists when the server stops, but is committed only after the store closed."""
    async with closing("Hello.", tmp_path) as server:
        journal = server.bench.store.journal
        deliver, reached = EndpointReply.deliver, asyncio.Event()

        async def late(reply: EndpointReply) -> None:
            reached.set()
            await server.go_on.wait()
            await journal.flush()
            while not journal._closed:
                await asyncio.sleep(0)
            await deliver(reply)

        monkeypatch.setattr(EndpointReply, "deliver", late)
        asking = asyncio.create_task(server.ask("s", [USER]))
        await reached.wait()
        server.stop()
        await server.ended.wait()
        server.go_on.set()
        assert await asking == STOPPING
    async with serve(out=tmp_path) as again:
        [live] = again.endpoint.sessions.all()
        assert live.trace == []
