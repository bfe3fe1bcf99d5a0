"""`EngineCore`: the embedded engine without HTTP, with queue, cache, weights, log and answers.

Invariants: each request is in `log` once, with the status of its answer. The rid of a request is in
use until the request is answered. Only started requests count as running.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import numpy as np
import orjson
from aiohttp import web
from tokenizers import Tokenizer

from toolroll.rollout.testing.faults import Fault, FaultedError, FaultPlan, inject
from toolroll.rollout.testing.generation import Generation, GenerationAborted
from toolroll.rollout.testing.log import LoggedRequest
from toolroll.rollout.testing.policy import Policy, PolicyRequest, Reply, echo
from toolroll.rollout.testing.prefix_cache import PrefixCache
from toolroll.rollout.testing.response import answer_body, queue_abort_body
from toolroll.rollout.testing.sampler import SampledReply, Sampler
from toolroll.rollout.testing.wire import EngineRequest, Limits, RefusedError, queue_full, refused

Latency = float | Callable[[PolicyRequest], float]
PauseMode = Literal["abort", "in_place", "retract"]
Send = Callable[[bytes], Awaitable[None]]


class EngineCore:
    """The engine without its HTTP server. `EmbeddedEngine` documents the parameters."""

    def __init__(
        self,
        tokenizer: Any,
        policy: Policy = echo,
        *,
        context_length: int = 32768,
        latency: Latency = 0.0,
        token_latency: float = 0.0,
        faults: FaultPlan | None = None,
        split: Literal["canonical", "random"] = "canonical",
        stop_token_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        weight_version: str = "default",
        max_total_tokens: int | None = None,
        max_running: int | None = None,
        max_queued: int | None = None,
        continue_aborted: bool = True,
        keep_log: bool = True,
        seed: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.policy = policy
        self.latency = latency
        self.token_latency = token_latency
        self.faults = faults
        self.limits = Limits(context_length, max_total_tokens)
        self.sampler = Sampler(tokenizer, stop_token_ids, split)
        self.vocab_size = vocab_size or self.sampler.vocab_size
        self.weight_version = weight_version
        self.healthy = True
        self.killed = 0
        self.held = 0
        self.log: list[LoggedRequest] = []
        self.url = ""
        self.address = (host, port)
        self._max_running = max_running
        self._max_queued = max_queued
        self._continue_aborted = continue_aborted
        self._keep_log = keep_log
        self._seed = seed
        self._arrivals = self._finishes = self._active = 0
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._caches: defaultdict[str, PrefixCache] = defaultdict(PrefixCache)
        self._rests: dict[str, tuple[bytes, list[int]]] = {}
        self._running: dict[str, Generation] = {}
        self._queue: deque[Generation] = deque()
        self._paused: PauseMode | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def model_name(self) -> str:
        """The name that the tokenizer was loaded from."""
        name = None if isinstance(self.tokenizer, Tokenizer) else self.tokenizer.name_or_path
        return str(name or "embedded")

    @property
    def context_length(self) -> int:
        """The limit of prompt and answer together, in tokens."""
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
        """Sample the next token of every request with `version`."""
        self.weight_version = version
        for generation in self._running.values():
            if generation.started:
                generation.switch(version)

    def abort(self, rid: str | None = None, *, every: bool = False) -> None:
        """Abort all requests whose rid starts with `rid`, or all requests if `every` is True, like
        `/abort_request`.
        """
        for name, generation in self._running.items():
            if every or (rid and name.startswith(rid)):
                generation.request_abort(paused=self._paused is not None)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling until `resume`. The mode "abort" ends running requests, and "retract" frees
        their cache.
        """
        self._paused = mode
        for generation in self._running.values():
            if mode == "abort":
                generation.abort()
            else:
                generation.pause()
                generation.retractions += mode == "retract" and generation.started

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = None
        for generation in self._running.values():
            generation.resume()
        self._dispatch()

    def flush_cache(self) -> bool:
        """Drop the cached prefixes. If a request is running, keep them and return False."""
        if self._active and self._paused != "retract":
            return False
        self._caches.clear()
        return True

    # --- answers ----------------------------------------------------------------------------------

    async def answer(
        self, request: EngineRequest, http: web.Request, send: Send | None = None
    ) -> Any:
        """Return the body of the answer to one request, and pass each part of it to `send`.

        Raise `RefusedError` or `FaultedError`.
        """
        entry = LoggedRequest(
            request.rid,
            request.routing_key,
            request.input_ids,
            request.params,
            headers=request.headers,
            arrival=self._arrivals,
        )
        self._arrivals += 1
        if self._keep_log:
            self.log.append(entry)
        self._notify()
        try:
            body = await self._admitted(entry, request, http, send)
            entry.status = 200
            return body
        except asyncio.CancelledError:
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
            self._notify()

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
            body = await self._sample(entry, seen, request, fault, generation, send)
            return fault.garble(body) if fault.garble is not None else body
        finally:
            del self._running[request.rid]
            if generation.started:
                self._active -= 1
                self._dispatch()
            generation.abort()

    def _check(self, request: EngineRequest) -> None:
        if request.rid in self._running:
            raise refused(f"Duplicate request ID detected: {request.rid}")
        self.limits.check(len(request.unchecked), request.params)
        if (
            int(request.unchecked.min(initial=0)) < 0
            or int(request.unchecked.max(initial=0)) >= self.vocab_size
        ):
            self.killed += 1
            raise RefusedError(500, "Internal Server Error")

    async def _start(self, generation: Generation) -> None:
        """Wait until the request may run. Raise `GenerationAborted`."""
        full = self._max_running is not None and self._active >= self._max_running
        if full and self._max_queued is not None and len(self._queue) >= self._max_queued:
            raise queue_full()
        self._queue.append(generation)
        self._dispatch()
        await generation.wait_for_start()

    def _dispatch(self) -> None:
        while (
            self._queue
            and self._paused is None
            and (self._max_running is None or self._active < self._max_running)
        ):
            generation = self._queue.popleft()
            if generation.aborted:
                continue
            generation.started = True
            generation.switch(self.weight_version)
            self._active += 1
            generation.wake()

    async def _sample(
        self,
        entry: LoggedRequest,
        seen: PolicyRequest,
        request: EngineRequest,
        fault: Fault,
        generation: Generation,
        send: Send | None,
    ) -> dict[str, Any]:
        began = time.perf_counter()
        cache = self._caches[request.extra_key]
        entry.cached_tokens = self._cached(cache, entry, request)
        sampled = SampledReply([], [], {}, "")
        try:
            reply = await self._reply(entry, seen, generation)
            rng = random.Random(f"{self._seed}/{request.routing_key}/{seen.call}")
            sampled = self.sampler.stop_at(
                self.sampler.reply_ids(reply, rng),
                request.params,
                self.limits.max_new_tokens(len(entry.input_ids), request.params),
            )
            latency = self.latency(seen) if callable(self.latency) else self.latency
            generation.begin(len(sampled.ids), latency, self.token_latency)
            if send is not None:
                stops = [fault.abort_after, reply.hold_after if reply.hold is not None else None]
                until = min((at for at in stops if at is not None), default=None)
                await self._play_in_parts(request, entry, sampled, generation, send, until=until)
            await self._play(reply, fault, sampled, generation)
            ids, finish, text = sampled.ids, sampled.finish, sampled.text
        except GenerationAborted:
            ids = sampled.ids[: generation.sampled()]
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            text = self.sampler.text(ids, request.params)
            entry.aborted = True
            self._remember_rest(entry, ids, sampled.reply_ids)
        # the last token has no KV yet
        cache.insert(np.concatenate([entry.input_ids, np.array(ids[:-1], dtype=np.int32)]))
        body = answer_body(
            request,
            entry,
            generation,
            ids=ids,
            finish=finish,
            text=text,
            version=self.weight_version,
        )
        body["meta_info"]["e2e_latency"] = time.perf_counter() - began
        return body

    def _cached(self, cache: PrefixCache, entry: LoggedRequest, request: EngineRequest) -> int:
        """Return `cached_tokens`. The last prompt token, and prompt tokens whose logprob is
        requested, are always computed, so they do not count.
        """
        most = len(entry.input_ids) - 1
        if request.return_logprob and request.logprob_start_len >= 0:
            most = min(most, request.logprob_start_len)
        return max(0, min(most, cache.match(entry.input_ids)))

    async def _reply(
        self, entry: LoggedRequest, seen: PolicyRequest, generation: Generation
    ) -> Reply:
        sequence, rest = self._rests.pop(entry.routing_key, (b"", []))
        if rest and sequence == entry.input_ids.tobytes():
            return Reply(output_ids=rest)
        entry.call = seen.call
        self._calls[entry.routing_key] += 1
        said = self.policy(seen)
        reply = await generation.race(said) if inspect.isawaitable(said) else said
        return reply if isinstance(reply, Reply) else Reply(reply)

    def _remember_rest(self, entry: LoggedRequest, ids: list[int], reply_ids: list[int]) -> None:
        if self._continue_aborted and reply_ids[len(ids) :]:
            sequence = entry.input_ids.tobytes() + np.array(ids, dtype=np.int32).tobytes()
            self._rests[entry.routing_key] = (sequence, reply_ids[len(ids) :])

    async def _play(
        self, reply: Reply, fault: Fault, sampled: SampledReply, generation: Generation
    ) -> None:
        """Wait while the tokens are sampled. Raise `GenerationAborted`."""
        length = len(sampled.ids)
        if fault.weight_version is not None:
            await generation.hold_at(min(fault.switch_after, length))
            self.set_weight_version(fault.weight_version)
            generation.release()
        if reply.hold is not None:
            await generation.hold_at(min(reply.hold_after, length))
            self.held += 1
            self._notify()
            try:
                await generation.race(reply.hold.wait())
            finally:
                self.held -= 1
            generation.release()
        if fault.abort_after is not None:
            await generation.hold_at(min(fault.abort_after, length))
            generation.abort()
        await generation.advance(length)

    async def _play_in_parts(
        self,
        request: EngineRequest,
        entry: LoggedRequest,
        sampled: SampledReply,
        generation: Generation,
        send: Send,
        *,
        until: int | None,
    ) -> None:
        """Send parts of the answer as they are sampled. Stop after `until` tokens, because an abort
        may cut off the rest.
        """
        step = max(1, int(request.params.get("stream_interval") or 1))
        end = len(sampled.ids) if until is None else min(until, len(sampled.ids))
        for at in range(step, end, step):
            await generation.advance(at)
            ids = sampled.ids[:at]
            text = self.sampler.text(ids, request.params)
            text = text if sampled.text.startswith(text) else sampled.text
            body = answer_body(
                request,
                entry,
                generation,
                ids=ids,
                finish=None,
                text=text,
                version=self.weight_version,
            )
            await send(orjson.dumps(body))

    def stop(self) -> None:
        """Abort all requests."""
        for generation in list(self._running.values()):
            generation.abort()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
