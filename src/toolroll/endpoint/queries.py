"""The requests that are answered without sampling. The server and the in-process client use the
same table `QUERIES`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from toolroll.endpoint.conversation.messages import read_messages
from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.dialects.openai_responses import not_found
from toolroll.endpoint.endpoint import Endpoint
from toolroll.endpoint.errors import ApiError, invalid
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.endpoint.requests.received import Received
from toolroll.endpoint.requests.request_bodies import TokenizeRequest, read
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.types import Tool


@dataclass(frozen=True, slots=True)
class Query:
    """A request to `endpoint`. `name`: the part of its path that names one object. `live` returns
    the session that it uses.
    """

    endpoint: Endpoint
    body: Received
    name: str
    live: Callable[[], LiveSession]


async def models(query: Query) -> dict[str, Any]:
    """Return the list of models."""
    await query.endpoint.refresh()
    return {"object": "list", "data": [_card(query.endpoint)]}


async def model(query: Query) -> dict[str, Any]:
    """Return the entry of the model."""
    endpoint = query.endpoint
    await endpoint.refresh()
    if query.name != endpoint.model_name:
        problem = f"this endpoint serves {endpoint.model_name!r}"
        raise ApiError(404, "model_not_found", problem, param="model")
    return _card(endpoint)


async def response(query: Query) -> bytes:
    """Return a stored response of the session."""
    live = query.endpoint.sessions.unnamed.with_response(query.live(), query.name)
    stored = live.responses.get(query.name)
    if stored is None:
        raise not_found(query.name)
    return stored.body


async def count_tokens(query: Query) -> dict[str, Any]:
    """Return the number of tokens in the prompt of a request in Anthropic's dialect."""
    endpoint, body = query.endpoint, query.body
    if body.data.get("max_tokens") is None:
        body.data["max_tokens"] = 1
    await endpoint.refresh()
    return {"input_tokens": await endpoint.count(endpoint.messages, query.live(), body)}


async def tokenize(query: Query) -> dict[str, Any]:
    """Return the token ids of messages or of a text, as vLLM's `/tokenize` does."""
    endpoint, body = query.endpoint, query.body
    request = await call_of_size(read, TokenizeRequest, body.data, large=body.large)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("messages", "give either messages or prompt")
    template = endpoint.templates.get(request.chat_template_kwargs)
    tools = body.data.get("tools") or []
    ids = await call_of_size(_tokens, request, template, tools, large=body.large)
    await endpoint.refresh()
    length = endpoint.model_info.context_length
    return {"tokens": ids, "count": len(ids), "max_model_len": length}


QUERIES: dict[tuple[str, str], Callable[[Query], Awaitable[dict[str, Any] | bytes]]] = {
    ("GET", "models"): models,
    ("GET", "models/{model:.+}"): model,
    ("GET", "responses/{response}"): response,
    ("POST", "messages/count_tokens"): count_tokens,
    ("POST", "tokenize"): tokenize,
}
"""By method, and by path without `/v1/`."""


def _card(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "id": endpoint.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "toolroll",
        "max_model_len": endpoint.model_info.context_length,
    }


def _tokens(request: TokenizeRequest, template: ChatTemplate, tools: list[Tool]) -> list[int]:
    if request.messages is None:
        return template.encoder.encode(request.prompt or "")
    messages = read_messages(
        request.messages,
        TemplateCache(template, images=True),
        IgnoredFields(),
        answer=request.add_generation_prompt,
    )
    ids = template.encode_conversation(messages, tools, generate=request.add_generation_prompt)
    return (
        ids
        if template.images is None
        else template.images.expand(as_ids(ids), messages)[0].tolist()
    )
