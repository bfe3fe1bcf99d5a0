"""`EngineCore`: the embedded engine without HTTP. It has the queue, the cache, the weights, the log
and the answers.

Invariants: each request is in `log` once, with the status of its answer. A request's rid is in use
until the request is answered. Only requests that have started count as running.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal

import numpy as np
import orjson
from aiohttp import ClientConnectionResetError, web
from tokenizers import Tokenizer

from toolroll.testing.faults import Fault, FaultedError, FaultPlan, inject
from toolroll.testing.generation import Generation, GenerationAborted
from toolroll.testing.language_model import LanguageModel
from toolroll.testing.model_source import ModelSource
from toolroll.testing.policy import LoggedRequest, Policy, PolicyRequest, echo
from toolroll.testing.prefix_cache import PrefixCache
from toolroll.testing.response import answer_body, queue_abort_body, without_beginning
from toolroll.testing.sampler import Sampler
from toolroll.testing.scripted_source import Latency, Script, ScriptedSource
from toolroll.testing.token_source import ABORTED, Answer, TokenSource, Turn
from toolroll.testing.wire import EngineRequest, Limits, RefusedError, queue_full, refused

Send = Callable[[bytes], Awaitable[None]]


class EngineCore:
    """The engine without its HTTP server. `EmbeddedEngine` documents the parameters."""

    def __init__(
        self,
        tokenizer: Any,
        policy: Policy | LanguageModel = echo,
        *,
        context_length: int = 32768,
        latency: Latency = 0.0,
        token_latency: float = 0.0,
        pool: float = inf,
        faults: FaultPlan | None = None,
        split: Literal["canonical", "random"] = "canonical",
        stop_token_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        weight_version: str = "default",
        max_running: int | None = None,
        max_queued: int | None = None,
        keep_log: bool = True,
        incremental_streaming_output: bool = False,
        session_cache: bool = False,
        lora_paths: Collection[str] = (),
        seed: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.faults = faults
        self.limits = Limits(context_length)
        self.sampler = Sampler(tokenizer, stop_token_ids, split)
        self.vocab_size = vocab_size or self.sampler.vocab_size
        self.weight_version = weight_version
        self.healthy, self.paused = True, False
        self.killed = 0
        self.held = 0
        self.log: list[LoggedRequest] = []
        self.model_path = self.model_name
        self.incremental_streaming_output = incremental_streaming_output
        self.session_cache = session_cache
        self.open_sessions: set[str] = set()
        self._closed_sessions: set[str] = set()
        self.lora_paths = lora_paths
        self.url = ""
        self.address = (host, port)
        self._max_running = inf if max_running is None else max_running
        self._max_queued = inf if max_queued is None else max_queued
        self._keep_log = keep_log
        self._arrivals = self._finishes = self._active = 0
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._running: dict[str, Generation] = {}
        self._queue: deque[Generation] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self.cache = PrefixCache()
        if isinstance(policy, LanguageModel):
            if latency or token_latency or split != "canonical":
                raise ValueError(
                    "latency, token_latency and split cannot be combined with a language model"
                )
            self._source: TokenSource = ModelSource(policy, self.sampler, seed)
        else:
            script = Script(policy, latency, token_latency, pool, seed)
            source = ScriptedSource(script, self.sampler, self)
            self._source, self.cache = source, source.cache

    @property
    def model_name(self) -> str:
        """The name that was used to load the tokenizer."""
        name = None if isinstance(self.tokenizer, Tokenizer) else self.tokenizer.name_or_path
        return str(name or "embedded")

    @property
    def context_length(self) -> int:
        """The limit of the prompt and the answer together, in tokens."""
        return self.limits.context_length

    # --- controls for tests -----------------------------------------------------------------------

    async def until(self, condition: Callable[[EngineCore], bool]) -> None:
        """Wait until `condition(engine)` is True. The condition is checked whenever a request
        arrives, reaches its `hold`, or ends.
        """
        while not condition(self):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def set_weight_version(self, version: str) -> None:
        """Set the weight version of all tokens sampled from now on, in running requests too."""
        self.weight_version = version
        for generation in self._running.values():
            if generation.started:
                generation.switch(version)

    def abort(self, rid: str | None = None, *, every: bool = False) -> None:
        """Abort requests as `/abort_request` does: each request whose rid starts with `rid`, or all
        if `every` is True.
        """
        for name, generation in self._running.items():
            if every or (rid and name.startswith(rid)):
                generation.abort()

    def pause(self, *, abort: bool = False) -> None:
        """Sample nothing until `resume`, as after `/pause_generation`: requests wait, and a
        language model stops between two tokens. If `abort` is True, the running requests are
        aborted. A scripted reply that has begun ends.
        """
        self.paused = True
        self._source.pause()
        if abort:
            self.abort(every=True)

    def resume(self) -> None:
        """Continue after `pause`."""
        self.paused = False
        self._source.resume()
        self._dispatch()

    def close_session(self, session_id: str) -> None:
        """Close a session as `/close_session` does: requests that end later do not open it."""
        self.open_sessions.discard(session_id)
        self._closed_sessions.add(session_id)

    async def update_weights(self, folder: str, version: str | None = None) -> None:
        """Load the weights in `folder`, and use them from the next token on, as
        `/update_weights_from_disk` does.

        All cached prefixes are dropped, and the keys and values of running requests are computed
        again. Raise `ModelFolderError` if the weights do not fit the model, or if the engine has no
        language model.
        """

        def updated() -> None:
            self.model_path = folder
            self.set_weight_version(self.weight_version if version is None else version)

        await self._source.update_weights(folder, updated)

    # --- answers ----------------------------------------------------------------------------------

    async def answer(
        self, request: EngineRequest, http: web.Request, send: Send | None = None
    ) -> Any:
        """Return the body of the response to one request.

        If `send` is given, the response is streamed: before the body is returned, `send` is called
        with each partial body, as JSON. Raise `RefusedError` if the request is invalid, and
        `FaultedError` if a fault replaces the response.
        """
        entry = LoggedRequest(
            request.rid,
            request.routing_key,
            request.input_ids,
            request.params,
            headers=request.headers,
            arrival=self._arrivals,
            session_id=request.session_id,
            lora_path=request.lora_path,
        )
        self._arrivals += 1
        if self._keep_log:
            self.log.append(entry)
        self._closed_sessions.discard(request.session_id or "")  # as in SGLang, it opens again
        self.notify()
        try:
            body = await self._admitted(entry, request, http, send)
            entry.status = 200
            if request.session_id and not entry.aborted:
                self.open_sessions |= {request.session_id} - self._closed_sessions
            return body
        except (asyncio.CancelledError, ClientConnectionResetError):  # the client disconnected
            entry.aborted = True
            raise
        except RefusedError as error:
            entry.status = error.status
            raise
        except FaultedError as error:
            entry.status = error.response.status if error.response is not None else 0
            raise
        except BaseException:  # an error in the policy: aiohttp logs it and answers 500
            entry.status = 500
            raise
        finally:
            entry.finished = self._finishes
            self._finishes += 1
            self.notify()

    async def _admitted(
        self, entry: LoggedRequest, request: EngineRequest, http: web.Request, send: Send | None
    ) -> Any:
        self._check(request)
        generation = self._running[request.rid] = Generation()
        try:
            seen = PolicyRequest(
                request.input_ids,
                self.sampler.decode,
                request.routing_key,
                self._calls[request.routing_key],
                entry.arrival,
                request.params,
            )
            fault = (self.faults(seen) if self.faults else None) or Fault()
            entry.faulted = fault != Fault()
            await inject(http, fault)
            try:
                await self._start(generation)
            except GenerationAborted:
                entry.aborted, entry.finish_reason = True, "abort"
                return queue_abort_body(request, self.weight_version)
            limit = self.limits.max_new_tokens(len(entry.input_ids), request.params)
            # Other requests with this routing key may have started while this one waited.
            seen = replace(seen, call=self._calls[request.routing_key])
            turn = Turn(request, entry, seen, fault, generation, limit, self._calls)
            body = await self._sample(turn, send)
            return fault.garble(body) if fault.garble is not None else body
        finally:
            del self._running[request.rid]
            if generation.started:
                self._active -= 1
                self._dispatch()
            generation.abort()

    def _check(self, request: EngineRequest) -> None:
        self._source.check(request)
        if request.rid in self._running:
            raise refused(f"Duplicate request ID detected: {request.rid}")
        if request.lora_path and request.lora_path not in self.lora_paths:
            raise refused(f"Got LoRA adapter that has never been loaded: {request.lora_path}")
        self.limits.check(len(request.unchecked), request.params)
        ids = request.unchecked
        if np.any((ids < 0) | (ids >= self.vocab_size)):
            self.killed += 1
            raise RefusedError(500, "Internal Server Error")

    async def _start(self, generation: Generation) -> None:
        """Wait until the request may run. Raise `RefusedError` if the queue is full, and
        `GenerationAborted` if the request is aborted while it waits.
        """
        if self._active >= self._max_running and len(self._queue) >= self._max_queued:
            raise queue_full()
        self._queue.append(generation)
        self._dispatch()
        await generation.wait_until(lambda: generation.started)

    def _dispatch(self) -> None:
        while self._queue and self._active < self._max_running and not self.paused:
            generation = self._queue.popleft()
            if generation.aborted:
                continue
            generation.started = True
            generation.switch(self.weight_version)
            self._active += 1
            generation.wake()

    async def _sample(self, turn: Turn, send: Send | None) -> dict[str, Any]:
        incremental = self.incremental_streaming_output and send is not None
        sent_ids, sent_text = 0, 0

        def body_of(answer: Answer) -> dict[str, Any]:
            nonlocal sent_ids, sent_text
            body = answer_body(
                turn.request, turn.entry, turn.generation, answer, version=self.weight_version
            )
            if incremental:
                body = without_beginning(body, sent_ids, sent_text)
                sent_ids, sent_text = len(answer.ids), max(sent_text, len(answer.text))
            return body

        async def report(part: Answer) -> None:
            if send is not None:
                await send(orjson.dumps(body_of(part)))

        began = time.perf_counter()
        answer = await self._source.sample(turn, None if send is None else report)
        turn.entry.aborted = answer.finish == ABORTED
        body = body_of(answer)
        body["meta_info"]["e2e_latency"] = time.perf_counter() - began
        return body

    def notify(self) -> None:
        """Make `until` check its condition again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
