"""The embedded engine's endpoints except `/generate`: aborts, weights, health, `/tokenize`, and
`/v1/chat/completions` for user simulators: one answer, no streaming and no tools.
"""

from __future__ import annotations

import time
import uuid
from math import inf
from typing import Any

import jinja2
import numpy as np
from aiohttp import web

from toolroll.testing.core import EngineCore
from toolroll.testing.language_model import ModelFolderError
from toolroll.testing.wire import (
    EngineRequest,
    invalid,
    json_response,
    read_json,
    read_params,
)

VERSION = "0.5.23+embedded"
"""The version of SGLang whose wire format the embedded engine uses, and that it is not SGLang."""

_SAMPLING = {
    **{name: name for name in "temperature top_p stop frequency_penalty presence_penalty".split()},
    "seed": "sampling_seed",
}
"""The fields of a request that are sampling parameters, with their names in `/generate`."""
_UNSUPPORTED = ("stream", "tools", "logprobs", "response_format")


class _Control:
    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    async def abort_request(self, request: web.Request) -> web.StreamResponse:
        """Abort requests. The response is always an empty 200, even if a rid is unknown."""
        body = await read_json(request)
        rid = body.get("rid")
        self._engine.abort(rid if isinstance(rid, str) else None, every=bool(body.get("abort_all")))
        return web.Response()

    async def close_session(self, request: web.Request) -> web.StreamResponse:
        self._engine.close_session(str((await read_json(request)).get("session_id")))
        return web.Response()

    async def update_weights_from_disk(self, request: web.Request) -> web.StreamResponse:
        """Load weights. Unlike SGLang, this does not wait for the running requests. They continue
        with the new weights.
        """
        body = await read_json(request)
        folder, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(folder, str):
            raise invalid("model_path must be a string")
        if version is not None and not isinstance(version, str):
            raise invalid("weight_version must be a string")
        if body.get("abort_all_requests"):
            self._engine.abort(every=True)
        try:
            await self._engine.update_weights(folder, version)
        except ModelFolderError as error:
            failure = {"success": False, "message": str(error), "num_paused_requests": 0}
            return json_response(failure, status=400)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        return json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def pause_generation(self, request: web.Request) -> web.StreamResponse:
        """Sample nothing until `/continue_generation`. The modes retract and in_place are the same
        here, because `/update_weights_from_disk` computes all keys and values again.
        """
        mode = (await read_json(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise invalid("mode must be abort, retract or in_place")
        self._engine.pause(abort=mode == "abort")
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.StreamResponse:
        self._engine.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._engine.healthy else 503)

    async def workers(self, request: web.Request) -> web.StreamResponse:
        """Return this engine as the only worker, as a router would. Trainers request this list."""
        url = f"{request.scheme}://{request.host}"
        worker = {"id": "embedded", "url": url, "worker_type": "regular", "is_healthy": True}
        return json_response({"workers": [worker], "total": 1})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """Return the ids of a text, or of each text in a list."""
        body = await read_json(request)
        prompt, special = body.get("prompt"), bool(body.get("add_special_tokens", True))
        texts = prompt if isinstance(prompt, list) else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise invalid(f"Invalid prompt type: {type(prompt)}. Expected str or List[str].")
        backend = self._engine.sampler.backend
        ids = [backend.encode(text, add_special_tokens=special).ids for text in texts]
        counts = [len(text_ids) for text_ids in ids]
        length = self._engine.context_length
        if isinstance(prompt, str):
            return json_response({"tokens": ids[0], "count": counts[0], "max_model_len": length})
        return json_response({"tokens": ids, "count": counts, "max_model_len": length})

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        name = self._engine.model_name
        return json_response(
            {
                "model_path": self._engine.model_path,
                "served_model_name": name,
                "tokenizer_path": name,
                "is_generation": True,
                "weight_version": self._engine.weight_version,
            }
        )

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        engine = self._engine
        return json_response(
            {
                "model_path": engine.model_path,
                "version": VERSION,
                "context_length": engine.context_length,
                "max_req_input_len": engine.limits.prompt,
                "weight_version": engine.weight_version,
                "incremental_streaming_output": engine.incremental_streaming_output,
                **({"enable_session_radix_cache": True} if engine.session_cache else {}),
            }
        )

    async def loads(self, request: web.Request) -> web.StreamResponse:
        """Return the load of this engine, or a 404 if the size of its cache is not limited."""
        cache = self._engine.cache
        if cache.size == inf:
            return web.Response(status=404)
        load = {
            "max_total_num_tokens": cache.size,
            "total_prefill_uncached_tokens": cache.computed,
            "total_prefill_busy_us": 0,
        }
        return json_response({"version": VERSION, "loads": [load]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        card = {
            "id": self._engine.model_name,
            "object": "model",
            "owned_by": "sglang",
            "max_model_len": self._engine.context_length,
        }
        return json_response({"object": "list", "data": [card]})

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Answer one chat completion request. The tokenizer's chat template renders the prompt. The
        policy or the language model of the engine returns the answer, as for `/generate`.
        """
        body = await read_json(request)
        answer = await self._engine.answer(_engine_request(self._engine, body, request), request)
        meta = answer["meta_info"]
        if "prompt_tokens" not in meta:  # aborted before it ran
            return json_response({"error": {"message": "Abort in waiting queue"}}, status=503)
        usage = {
            "prompt_tokens": meta["prompt_tokens"],
            "completion_tokens": meta["completion_tokens"],
        }
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


def control_routes(engine: EngineCore) -> list[web.RouteDef]:
    """Return all routes except `/generate`."""
    control = _Control(engine)
    return [
        web.get("/health", control.health),
        web.get("/health_generate", control.health),
        web.get("/model_info", control.model_info),
        web.get("/get_model_info", control.model_info),
        web.get("/server_info", control.server_info),
        web.get("/get_server_info", control.server_info),
        web.get("/v1/models", control.models),
        web.get("/v1/loads", control.loads),
        web.get("/workers", control.workers),
        web.post("/v1/chat/completions", control.chat_completions),
        web.post("/tokenize", control.tokenize),
        web.post("/v1/tokenize", control.tokenize),
        web.post("/abort_request", control.abort_request),
        web.post("/close_session", control.close_session),
        web.post("/update_weights_from_disk", control.update_weights_from_disk),
        web.post("/pause_generation", control.pause_generation),
        web.post("/continue_generation", control.continue_generation),
    ]


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
    except (jinja2.TemplateError, ValueError) as error:
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
