"""Sessions in three dialects at the same time, every other turn streamed: none is lost, none gets
another's answer, and the engine's log confirms each token.

TOOLROLL_FAULTS=full plays 500 sessions of each dialect.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from support import anthropic_wire, responses_wire
from support.endpoints import Bench, endpoint

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SESSIONS = 500 if os.environ.get("TOOLROLL_FAULTS") == "full" else 20
TURNS = 20


async def _chat(bench: Bench, session: str, history: list[Any], *, stream: bool) -> str:
    client_path = f"/sessions/{session}/v1/chat/completions"
    status, answer = await bench.post(client_path, {"messages": history})
    assert status == 200, answer
    message: dict[str, Any] = answer["choices"][0]["message"]
    history.append(message)
    return str(message["content"])


async def _messages(bench: Bench, session: str, history: list[Any], *, stream: bool) -> str:
    body = {"model": "m", "max_tokens": 100, "messages": history}
    path = f"/sessions/{session}/v1/messages"
    reply = await anthropic_wire.ask(bench, body, path=path, stream=stream)
    history.append({"role": "assistant", "content": reply["content"]})
    return str(reply["content"][-1]["text"])


async def _responses(bench: Bench, session: str, history: list[Any], *, stream: bool) -> str:
    path = f"/sessions/{session}/v1/responses"
    body = {"model": "m", "input": history, "store": False}
    reply = await responses_wire.ask(bench, body, path=path, stream=stream)
    history += reply["output"]
    return str(reply["output"][-1]["content"][0]["text"])


ASK = {"chat": _chat, "messages": _messages, "responses": _responses}


async def _play(bench: Bench, dialect: str, number: int) -> None:
    session, history = f"{dialect}-{number}", list[Any]()
    for turn in range(TURNS):
        history.append({"role": "user", "content": f"{session}: {turn}?"})
        said = await ASK[dialect](bench, session, history, stream=bool(turn % 2))
        assert said == f"{session} says {turn}."


async def test_sessions_of_all_dialects_are_neither_lost_nor_mixed_up(tokenizer: Any) -> None:
    async with endpoint(
        tokenizer,
        lambda request: f"{request.routing_key} says {request.call}.",
        settings={"verify": "sample", "grace": 0.0},
    ) as bench:
        asked = [(dialect, number) for number in range(SESSIONS) for dialect in ASK]
        await asyncio.gather(*(_play(bench, *one) for one in asked))
        assert len(bench.engine.log) == len(asked) * TURNS
        for dialect, number in asked:
            [trajectory] = await bench.trajectories(f"{dialect}-{number}")
            assert len(trajectory["turns"]) == TURNS
            assert trajectory["fork_reason"] is None
