"""The embedded engine's `/v1/chat/completions`. It supports only what a user simulator needs: one
answer, no streaming and no tools.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import numpy as np
from aiohttp import web
from jinja2 import TemplateError

from toolroll.rollout.testing.core import EngineCore
from toolroll.rollout.testing.wire import (
    EngineRequest,
    invalid,
    json_response,
    read_json,
    read_params,
)

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "stop": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "sampling_seed",
}
"""The fields of a request that are sampling parameters, with their names in `/generate`."""
_UNSUPPORTED = ("stream", "tools", "logprobs", "response_format")


async def chat_completions(engine: EngineCore, request: web.Request) -> web.StreamResponse:
    """Answer one chat completion request. The tokenizer's chat template renders the prompt. The
    policy or the language model of the engine returns the answer, as for `/generate`.
    """
    body = await read_json(request)
    answer = await engine.answer(_engine_request(engine, body, request), request)
    meta = answer["meta_info"]
    if "prompt_tokens" not in meta:  # aborted before it ran
        return json_response({"error": {"message": "Abort in waiting queue"}}, status=503)
    usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": meta["completion_tokens"]}
    message = {"role": "assistant", "content": answer["text"]}
    return json_response(
        {
            "id": meta["id"],
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or "embedded",
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": meta["finish_reason"]["type"],
                    "logprobs": None,
                }
            ],
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }
    )


def _engine_request(
    engine: EngineCore, body: dict[str, Any], request: web.Request
) -> EngineRequest:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list, and not empty")
    for unsupported in (*_UNSUPPORTED, *(("n",) if body.get("n") != 1 else ())):
        if body.get(unsupported):
            raise invalid(f"the embedded engine's chat completions do not support {unsupported}")
    try:
        text = engine.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, ValueError) as error:
        raise invalid(f"the chat template refuses messages: {error}") from error
    params = {name: body[field] for field, name in _SAMPLING.items() if body.get(field) is not None}
    # None: up to the context length
    params["max_new_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens")
    headers = {name.lower(): value for name, value in request.headers.items()}
    prompt = np.array(engine.sampler.encode(text), dtype=np.int64)
    return EngineRequest(
        uuid.uuid4().hex,
        prompt,
        read_params(params),
        routing_key=headers.get("x-smg-routing-key", "chat"),
        headers=headers,
    )
