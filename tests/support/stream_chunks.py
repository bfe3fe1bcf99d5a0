"""Join the chunks of a streamed answer like a client."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.dialects.openai_chat import ChatCompletions, ChatWriter
from toolroll.endpoint.requests.request_bodies import ChatRequest
from toolroll.parsers.types import Delta
from toolroll.rollout.template.encode import Encoder
from toolroll.testing import load_embedded_tokenizer


@cache
def _encoder() -> Encoder:
    return Encoder(load_embedded_tokenizer())


def chat_deltas(steps: Iterable[Delta]) -> list[dict[str, Any]]:
    """The pieces of one choice as the deltas of a chat completion."""
    ids = np.zeros(0, dtype=np.int32)
    result = CompletionResult(id="x", created=0, model="m", prompt_ids=ids)
    dialect = ChatCompletions(_encoder(), openrlhf=False)
    writer = ChatWriter(dialect, ChatRequest(messages=[{}]), result)
    list(writer.start())
    events = [event for step in steps for event in writer.add(0, step)]
    return [event["choices"][0]["delta"] for event in events]


def message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from the deltas of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
                )
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return message


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message of choice `index`, from the chunks of all choices."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return message_of(choice["delta"] for choice in choices if choice["index"] == index)


def whole(message: dict[str, Any]) -> dict[str, Any]:
    """The same of a message that came in one piece."""
    calls = [{"id": it["id"], **it["function"]} for it in message.get("tool_calls") or ()]
    return {
        "content": message.get("content") or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": [
            {"id": it["id"], "name": it["name"], "arguments": it["arguments"]} for it in calls
        ],
    }
