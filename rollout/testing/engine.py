"""`EmbeddedEngine`: a real HTTP server that speaks SGLang 0.5.23's `/generate` on the level of token ids, without weights.

A public test double. A policy says what to say; everything else is as on the wire: the stop token is in `output_ids` and not in
`text`, stop strings trim the text and not the ids, aborts are 200s with a partial output, errors have SGLang's own bodies.
Invariants: it shares no code with our templates and sessions; each logprob is `reference_logprob(prefix, id)`; `log` holds every
request with what was answered, and is the tests' oracle.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from aiohttp import web

from toolroll.rollout.testing.logprob import reference_logprobs
from toolroll.rollout.testing.policy import Fault, FaultPlan, Policy, PolicyRequest, Reply, echo
from toolroll.rollout.testing.splits import random_split

_DEFAULT_MAX_NEW_TOKENS = 128
_KNOWN_PARAMS = frozenset(
    (
        "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty "
        "repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens "
        "spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed custom_params beam_width "
        "watermark choice "
    ).split()
)
_REMEMBERED = 8  # sequences per routing key in the simulated prefix cache

Latency = float | Callable[[PolicyRequest], float]


@dataclass(slots=True)
class LoggedRequest:
    """One request and its answer. `output_ids` and `logprobs` are what was sent; `status` the HTTP status."""

    rid: str
    routing_key: str
    input_ids: npt.NDArray[np.int32]
    sampling_params: Mapping[str, Any]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    status: int = 200
    aborted: bool = False


class _Refused(Exception):
    """An HTTP error with its body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body


class EmbeddedEngine:
    """Serves on 127.0.0.1 while its context is open.

    `tokenizer`: any fast tokenizer of `transformers`. `stop_token_ids`: default, the tokenizer's end-of-sequence token.
    `latency`: seconds per request. `split`: "random" samples other token splits of the same text. `killed` counts what
    would have killed a
    real engine: an id outside the vocabulary.
    """

    def __init__(
        self,
        tokenizer: Any,
        policy: Policy = echo,
        *,
        context_length: int = 32768,
        latency: Latency = 0.0,
        faults: FaultPlan | None = None,
        split: Literal["canonical", "random"] = "canonical",
        stop_token_ids: Sequence[int] | None = None,
        weight_version: str = "default",
        seed: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.policy = policy
        self.context_length = context_length
        self.latency = latency
        self.faults = faults
        self.split = split
        self.weight_version = weight_version
        self.log: list[LoggedRequest] = []
        self.killed = 0
        self.url = ""
        self._backend = tokenizer.backend_tokenizer
        self._vocab_size = len(tokenizer)
        self._stops = set(stop_token_ids if stop_token_ids is not None else [tokenizer.eos_token_id])
        self._stop_id = min(self._stops)
        self._rng = random.Random(seed)
        self._seed = seed
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._cache: defaultdict[str, deque[npt.NDArray[np.int32]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._running: dict[str, asyncio.Event] = {}
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._address = (host, port)
        self._runner: web.AppRunner | None = None

    # --- serving -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> EmbeddedEngine:
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
                web.post("/update_weight_version", self._update_weight_version),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/flush_cache", self._flush_cache),
                web.get("/health", self._health),
                web.get("/health_generate", self._health),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._address, backlog=4096)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None
        for event in self._running.values():
            event.set()
        await self._runner.cleanup()

    # --- /generate ---------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = orjson.loads(await request.read())
            routing_key = request.headers.get("x-smg-routing-key", "")
            prompts = self._prompts(body)
            batch = bool(prompts) and isinstance(body.get("input_ids", body.get("text")), list) and _nested(body)
            params = dict(body.get("sampling_params") or {})
            answers = []
            for prompt in prompts:
                for _ in range(int(params.get("n", 1))):
                    answers.append(await self._answer(request, body, prompt, params, routing_key))
            single = not batch and params.get("n", 1) == 1
            return _json(answers[0] if single else answers)
        except _Refused as refused:
            return _json(refused.body, status=refused.status)
        except _Faulted as faulted:
            return faulted.response

    def _prompts(self, body: Mapping[str, Any]) -> list[npt.NDArray[np.int32]]:
        unknown = [name for name in body.get("sampling_params") or {} if name not in _KNOWN_PARAMS]
        if unknown:
            raise _Refused(400, {"error": f"unknown field `{unknown[0]}`, expected one of {sorted(_KNOWN_PARAMS)}"})
        ids = body.get("input_ids")
        if ids is None:
            texts = body.get("text") or ""
            texts = texts if isinstance(texts, list) else [texts]
            ids = [self.tokenizer.encode(text) for text in texts]
        elif ids and not isinstance(ids[0], list):
            ids = [ids]
        return [np.array(prompt, dtype=np.int64).astype(np.int32) for prompt in ids]

    async def _answer(
        self,
        http: web.Request,
        body: Mapping[str, Any],
        prompt: npt.NDArray[np.int32],
        params: dict[str, Any],
        routing_key: str,
    ) -> dict[str, Any]:
        rid = body["rid"] if isinstance(body.get("rid"), str) and params.get("n", 1) == 1 else uuid.uuid4().hex
        entry = LoggedRequest(rid, routing_key, prompt, params)
        seen = PolicyRequest(
            prompt,
            self._backend.decode(prompt.tolist(), skip_special_tokens=False),
            routing_key,
            self._calls[routing_key],
            len(self.log),
            params,
        )
        self.log.append(entry)
        try:
            self._check(prompt, params, rid)
            fault = (self.faults(seen) if self.faults else None) or Fault()
            await self._fail(http, fault)
        except _Refused as refused:
            entry.status = refused.status
            raise
        except _Faulted as faulted:
            entry.status = faulted.response.status if faulted.response.status != 200 else 0
            raise
        self._calls[routing_key] += 1
        abort = self._running[rid] = asyncio.Event()
        try:
            return await self._sample(entry, seen, body, params, fault, abort)
        except asyncio.CancelledError:
            entry.aborted = True
            raise
        finally:
            self._running.pop(rid, None)

    def _check(self, prompt: npt.NDArray[np.int32], params: Mapping[str, Any], rid: str) -> None:
        """SGLang's own refusals, with its own words."""
        length, limit = len(prompt), self.context_length
        if rid in self._running:
            raise _Refused(400, {"error": {"message": f"Duplicate request ID detected: {rid}"}})
        if length and (int(prompt.max()) >= self._vocab_size or int(prompt.min()) < 0):
            self.killed += 1
            raise _Refused(500, "Internal Server Error")
        if length >= limit:
            words = f"The input ({length} tokens) is longer than the model's context length ({limit} tokens)."
            raise _Refused(400, {"error": {"message": words}})
        wanted = params.get("max_new_tokens")
        if wanted is not None and length + wanted > limit:
            words = (
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total of "
                f"{length + wanted} tokens: {length} tokens from the input messages and {wanted} tokens for the completion."
            )
            raise _Refused(400, {"error": {"message": words}})

    async def _fail(self, http: web.Request, fault: Fault) -> None:
        if fault.hang is not None:
            await asyncio.sleep(fault.hang)
        if fault.drop:
            if http.transport is not None:
                http.transport.abort()
            raise _Faulted(web.Response(status=200))
        if fault.status is not None:
            raise _Faulted(web.Response(status=fault.status, body=fault.body, headers=dict(fault.headers)))

    async def _sample(
        self,
        entry: LoggedRequest,
        seen: PolicyRequest,
        body: Mapping[str, Any],
        params: Mapping[str, Any],
        fault: Fault,
        abort: asyncio.Event,
    ) -> dict[str, Any]:
        began = time.perf_counter()
        versions_before = self.weight_version
        said = self.policy(seen)
        reply = await said if inspect.isawaitable(said) else said
        ids, finish, text = self._finish(reply if isinstance(reply, Reply) else Reply(reply), params)
        waited = self.latency(seen) if callable(self.latency) else self.latency
        await self._unpaused.wait()
        aborted = await _wait(abort, waited)
        if aborted or fault.abort_after is not None:
            share = min(1.0, (time.perf_counter() - began) / waited) if waited else 1.0
            kept = fault.abort_after if fault.abort_after is not None else int(len(ids) * share)
            ids = ids[:kept]
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            text = self._text(ids, params)
            entry.aborted = True
        cached = self._cached(entry.routing_key, entry.input_ids)
        logprobs = reference_logprobs(entry.input_ids, ids)
        self._cache[entry.routing_key].append(np.concatenate([entry.input_ids, np.array(ids, dtype=np.int32)]))
        entry.output_ids, entry.logprobs, entry.finish_reason = ids, logprobs, str(finish["type"])
        meta: dict[str, Any] = {
            "id": entry.rid,
            "finish_reason": finish,
            "prompt_tokens": len(entry.input_ids),
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(ids),
            "cached_tokens": cached,
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": time.perf_counter() - began,
            "response_sent_to_client_ts": time.time(),
        }
        meta |= self._versions(versions_before, len(ids), fault)
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = self._input_logprobs(entry.input_ids, body.get("logprob_start_len", -1))
            meta["output_token_logprobs"] = [[lp, index, None] for lp, index in zip(logprobs, ids, strict=True)]
            meta["output_token_logprobs_length"] = len(ids)
        answer: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
        return fault.garble(answer) if fault.garble is not None else answer

    def _finish(self, reply: Reply, params: Mapping[str, Any]) -> tuple[list[int], dict[str, Any], str]:
        """The ids as sampled, the finish reason and the text, in SGLang's order: stop tokens, stop strings, length."""
        if reply.output_ids is not None:
            ids = [int(index) for index in reply.output_ids]
        else:
            ids = list(self._backend.encode(reply.text, add_special_tokens=False).ids)
            if self.split == "random":
                ids = random_split(self.tokenizer, ids, self._rng)
            ids += [self._stop_id] if reply.stop else []
        limit = params.get("max_new_tokens")
        limit = _DEFAULT_MAX_NEW_TOKENS if limit is None else int(limit)
        stops = set(params.get("stop_token_ids") or ()) | (set() if params.get("ignore_eos") else self._stops)
        strings = params.get("stop") or ()
        strings = [strings] if isinstance(strings, str) else list(strings)
        for at, index in enumerate(ids[:limit]):
            if index in stops:
                kept = ids[: at + 1]
                trimmed = kept if params.get("no_stop_trim") else kept[:-1]
                return kept, {"type": "stop", "matched": index}, self._text(trimmed, params)
            matched = self._stop_string(ids[: at + 1], strings) if strings else None
            if matched is not None:
                text = self._text(ids[: at + 1], params)
                cut = text if params.get("no_stop_trim") else text[: text.find(matched)]
                return ids[: at + 1], {"type": "stop", "matched": matched}, cut
        kept = ids[:limit]
        return kept, {"type": "length", "length": len(kept)}, self._text(kept, params)

    def _stop_string(self, ids: list[int], strings: Sequence[str]) -> str | None:
        text = self._backend.decode(ids, skip_special_tokens=False)
        return next((string for string in strings if string in text), None)

    def _text(self, ids: Sequence[int], params: Mapping[str, Any]) -> str:
        skip = params.get("skip_special_tokens", True)
        return str(self._backend.decode(list(ids), skip_special_tokens=skip))

    def _cached(self, routing_key: str, prompt: npt.NDArray[np.int32]) -> int:
        """How many tokens of `prompt` an earlier sequence of this routing key holds; the last one is always computed."""
        best = 0
        for earlier in self._cache[routing_key]:
            n = min(len(earlier), len(prompt) - 1)
            differs = np.flatnonzero(earlier[:n] != prompt[:n])
            best = max(best, int(differs[0]) if len(differs) else n)
        return best

    def _versions(self, before: str, n: int, fault: Fault) -> dict[str, Any]:
        if fault.weight_version is not None:
            self.weight_version = fault.weight_version
        after, at = self.weight_version, min(fault.switch_after, n)
        spans: list[dict[str, Any]]
        if after == before or at == 0:
            spans = [{"version": after, "start": 0, "end": n}]
        else:
            spans = [{"version": before, "start": 0, "end": at}, {"version": after, "start": at, "end": n}]
        return {"weight_version": after, "weight_versions": [span for span in spans if span["end"] != span["start"]]}

    def _input_logprobs(self, prompt: npt.NDArray[np.int32], start: int) -> list[list[Any]]:
        if start < 0:
            return []
        found: list[list[Any]] = []
        for at in range(start, len(prompt)):
            value = None if at == 0 else reference_logprobs(prompt[:at], [int(prompt[at])])[0]
            found.append([value, int(prompt[at]), None])
        if found:
            found[0][0] = None
        return found

    # --- control -----------------------------------------------------------------------------------------------------

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        prefix = body.get("rid")
        for rid, event in self._running.items():
            if body.get("abort_all") or (prefix and rid.startswith(prefix)):
                event.set()
        return web.Response(status=200)

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.weight_version = body["new_version"]
        if body.get("abort_all_requests", True):
            for event in self._running.values():
                event.set()
        return _json({"success": True, "new_version": self.weight_version})

    async def _pause(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        if body.get("mode", "abort") == "abort":
            for event in self._running.values():
                event.set()
        self._unpaused.clear()
        return _json({"success": True})

    async def _continue(self, request: web.Request) -> web.Response:
        self._unpaused.set()
        return _json({"success": True})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if self._running:
            return web.Response(status=400, text="Flush cache failed.")
        self._cache.clear()
        return web.Response(text="Cache flushed.")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200)

    async def _model_info(self, request: web.Request) -> web.Response:
        return _json({"model_path": "embedded", "is_generation": True, "weight_version": self.weight_version})

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json({"model_path": "embedded", "version": "0.5.23", "context_length": self.context_length})

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": "embedded", "max_model_len": self.context_length}]})

    async def _chat(self, request: web.Request) -> web.Response:
        """Just enough of `/v1/chat/completions` for a user simulator: one answer, no streaming, no tools."""
        body = orjson.loads(await request.read())
        text = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
        prompt = np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        params = {"max_new_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or 1024}
        key = request.headers.get("x-smg-routing-key", "chat")
        try:
            answer = await self._answer(request, {}, prompt, params, key)
        except _Refused as refused:
            return _json(refused.body, status=refused.status)
        except _Faulted as faulted:
            return faulted.response
        meta = answer["meta_info"]
        usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": meta["completion_tokens"]}
        message = {"role": "assistant", "content": answer["text"]}
        return _json(
            {
                "id": meta["id"],
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model") or "embedded",
                "choices": [{"index": 0, "message": message, "finish_reason": meta["finish_reason"]["type"]}],
                "usage": {**usage, "total_tokens": sum(usage.values())},
            }
        )


class _Faulted(Exception):
    """An injected fault's answer."""

    def __init__(self, response: web.Response) -> None:
        super().__init__("injected fault")
        self.response = response


async def _wait(abort: asyncio.Event, seconds: float) -> bool:
    """Wait `seconds`, or until `abort` is set; whether it was."""
    if seconds <= 0:
        return abort.is_set()
    try:
        await asyncio.wait_for(abort.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _nested(body: Mapping[str, Any]) -> bool:
    value = body.get("input_ids", body.get("text"))
    return bool(value) and isinstance(value, list) and isinstance(value[0], list | str)


def _json(data: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")
