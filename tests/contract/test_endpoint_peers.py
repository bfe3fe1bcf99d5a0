"""Frameworks that ask for other versions of what the tests need, and are tried where somebody
installed them.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.client_scenario import FIRST, one_episode, seen
from support.client_scenario import saying as policy
from support.endpoints import endpoint
from support.listed_environment import TOOL

from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.peers


async def test_verifiers_own_client_with_its_session_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """verifiers 0.4.0 (asks for openai < 3): its client sends the trace's id as X-Session-ID,
    which is our session.
    """
    eval_client = pytest.importorskip("verifiers.v1.clients.eval")
    configs = pytest.importorskip("verifiers.v1.configs.client")
    chat = pytest.importorskip("verifiers.v1.dialects.chat")
    monkeypatch.setenv("A_KEY", "unused")
    async with endpoint(load_embedded_tokenizer(), policy, split="random") as bench:
        client = eval_client.EvalClient(
            configs.EvalClientConfig(base_url=f"{bench.url}/v1", api_key_var="A_KEY")
        )
        messages: list[Any] = list(FIRST)
        while True:
            body = {"model": "m", "messages": messages, "tools": [TOOL], "logprobs": True}
            reply = await client.get_response(chat.ChatDialect(), body, None, session_id="trace-1")
            message = reply.raw["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for wanted in message["tool_calls"]:
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": wanted["id"],
                        "content": seen(wanted["function"]["arguments"]),
                    }
                )
        await one_episode(bench, "trace-1")
