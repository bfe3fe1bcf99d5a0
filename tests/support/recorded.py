"""Sessions of an endpoint with `--out`: what is asked and replied, and how they end."""

from __future__ import annotations

import asyncio
from typing import Any

from support.endpoints import Bench
from support.episodes import call
from support.listed_environment import TOOL

from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.testing import PolicyRequest

USER: Any = {"role": "user", "content": "Hi"}
CHAT = "/sessions/{}/v1/chat/completions"


def policy(request: PolicyRequest) -> str:
    said = ["Hello.", f"I look. {call(at=request.index)}", "<think>\nHm\n</think>\n\nYes."]
    return said[request.index % 3]


async def ask(bench: Bench, messages: list[Any], session: str = "s", **more: Any) -> list[Any]:
    """Send a chat request; return its messages with the first answer and a result for its calls."""
    status, answer = await bench.post(
        CHAT.format(session), {"messages": messages, "tools": [TOOL], **more}
    )
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": made["id"], "content": "seen"}
        for made in message.get("tool_calls") or ()
    ]
    return [*messages, message, *(results or [USER])]


def hold_the_end(bench: Bench) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold each session that is being finished. Return events: one is held; let it go on."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    store = bench.endpoint.store
    assert store is not None
    settle = store._settle

    async def held(live: LiveSession) -> None:
        reached.set()
        await go_on.wait()
        await settle(live)

    store._settle = held
    return reached, go_on


async def delete(bench: Bench, session: str) -> int:
    async with bench.http.delete(f"{bench.url}/sessions/{session}") as response:
        return response.status
