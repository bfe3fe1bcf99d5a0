"""`tokenize`: the token ids of messages or of a text, as in vLLM's `/tokenize`."""

from __future__ import annotations

from typing import Any

from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.server.conversation.messages import read_messages
from toolroll.rollout.server.endpoint import Endpoint
from toolroll.rollout.server.errors import invalid
from toolroll.rollout.server.requests.protocol import TokenizeRequest, read
from toolroll.rollout.server.requests.received import Received
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.types import Tool


async def tokenize(endpoint: Endpoint, body: Received) -> dict[str, Any]:
    """Return the answer to `POST /tokenize`. Raise `ApiError` if `body` cannot be honored."""
    parsed = await call_of_size(read, TokenizeRequest, body.data, large=body.large)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise invalid("messages", "give either messages or prompt")
    template = endpoint.templates.get(parsed.chat_template_kwargs)
    tools = body.data.get("tools") or []
    ids = await call_of_size(_tokens, parsed, template, tools, large=body.large)
    await endpoint.refresh()
    length = endpoint.capabilities.context_length
    return {"tokens": ids, "count": len(ids), "max_model_len": length}


def _tokens(parsed: TokenizeRequest, template: ChatTemplate, tools: list[Tool]) -> list[int]:
    if parsed.messages is None:
        return template.encoder.encode(parsed.prompt or "")
    developer = "developer" in template.renderer.source
    messages = read_messages(
        parsed.messages, developer=developer, answer=parsed.add_generation_prompt
    )
    return template.encode_conversation(messages, tools, generate=parsed.add_generation_prompt)
