"""`EngineCore`: what the embedded engine is behind its HTTP: its queue, its cache, its weights, its
log, and how it answers.

Invariants: each request is in `log` once, with the status that it got; its rid is taken while it is
unanswered; only started ones count as running.
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
from toolroll.rollout.testing.generation import Run, RunAborted
from toolroll.rollout.testing.log import LoggedRequest
from toolroll.rollout.testing.policy import Policy, PolicyRequest, Reply, echo
from toolroll.rollout.testing.prefix_cache import PrefixCache
from toolroll.rollout.testing.response import answer_body, queue_abort_body
from toolroll.rollout.testing.sampler import Planned, Sampler
from toolroll.rollout.testing.wire import Ask, Limits, RefusedError, queue_full, refused

Latency = float | Callable[[PolicyRequest], float]
PauseMode = Literal["abort", "in_place", "retract"]
Send = Callable[[bytes], Awaitable[None]]


class EngineCore:
    """The engine without its HTTP server; `EmbeddedEngine` tells the settings."""

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
        self.speaker = Sampler(tokenizer, stop_token_ids, split)
        self.vocab_size = vocab_size or self.speaker.vocab_size
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
        self._running: dict[str, Run] = {}
        self._queue: deque[Run] = deque()
        self._paused: PauseMode | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def model_name(self) -> str:
        """What the tokenizer was loaded from."""
        name = None if isinstance(self.tokenizer, Tokenizer) else self.tokenizer.name_or_path
        return str(name or "embedded")

    @property
    def context_length(self) -> int:
        """Prompt and answer together, in tokens."""
        return self.limits.context_length

    # --- what tests do to it ----------------------------------------------------------------------

    async def until(self, condition: Callable[[EngineCore], bool]) -> None:
        """Wait until `condition(engine)`, looked at whenever a request arrives, stands at its
        `hold`, or ends.
        """
        while not condition(self):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def set_weight_version(self, version: str) -> None:
        """From the next token of every request on, `version` samples."""
        self.weight_version = version
        for run in self._running.values():
            if run.started:
                run.switch(version)

    def abort(self, rid: str | None = None, *, every: bool = False) -> None:
        """What `/abort_request` does: all running requests whose rid begins with `rid`, or every
        one.
        """
        for name, run in self._running.items():
            if every or (rid and name.startswith(rid)):
                run.ask_abort(paused=self._paused is not None)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling until `resume`. "abort" ends running requests; "retract" frees their
        cache.
        """
        self._paused = mode
        for run in self._running.values():
            if mode == "abort":
                run.abort()
            else:
                run.pause()
                run.retractions += mode == "retract" and run.started

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = None
        for run in self._running.values():
            run.resume()
        self._dispatch()

    def flush_cache(self) -> bool:
        """Forget the prefixes; False, and nothing is done, while something runs."""
        if self._active and self._paused != "retract":
            return False
        self._caches.clear()
        return True

    # --- answers ----------------------------------------------------------------------------------

    async def answer(self, ask: Ask, http: web.Request, send: Send | None = None) -> Any:
        """Return the body of the answer to one request, and pass each part of it to `send`.

        Raise `RefusedError` or `FaultedError`.
        """
        entry = LoggedRequest(
            ask.rid,
            ask.routing_key,
            ask.input_ids,
            ask.params,
            headers=ask.headers,
            arrival=self._arrivals,
        )
        self._arrivals += 1
        if self._keep_log:
            self.log.append(entry)
        self._notify()
        try:
            body = await self._admitted(entry, ask, http, send)
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
        except BaseException:  # a policy's own mistake: aiohttp logs it and answers 500
            entry.status = 500
            raise
        finally:
            entry.finished = self._finishes
            self._finishes += 1
            self._notify()

    async def _admitted(
        self, entry: LoggedRequest, ask: Ask, http: web.Request, send: Send | None
    ) -> Any:
        self._check(ask)
        run = self._running[ask.rid] = Run()
        try:
            seen = PolicyRequest(
                ask.input_ids,
                self.speaker.decode,
                ask.routing_key,
                self._calls[ask.routing_key],
                entry.arrival,
                ask.params,
            )
            fault = (self.faults(seen) if self.faults else None) or Fault()
            entry.faulted = fault != Fault()
            await inject(http, fault)
            try:
                await self._start(run)
            except RunAborted:
                entry.aborted, entry.finish_reason = True, "abort"
                return queue_abort_body(ask, self.weight_version)
            body = await self._sample(entry, seen, ask, fault, run, send)
            return fault.garble(body) if fault.garble is not None else body
        finally:
            del self._running[ask.rid]
            if run.started:
                self._active -= 1
                self._dispatch()
            run.abort()

    def _check(self, ask: Ask) -> None:
        if ask.rid in self._running:
            raise refused(f"Duplicate request ID detected: {ask.rid}")
        self.limits.check(len(ask.unchecked), ask.params)
        if (
            int(ask.unchecked.min(initial=0)) < 0
            or int(ask.unchecked.max(initial=0)) >= self.vocab_size
        ):
            self.killed += 1
            raise RefusedError(500, "Internal Server Error")

    async def _start(self, run: Run) -> None:
        """Wait for a place among the running ones; raises `RunAborted`."""
        full = self._max_running is not None and self._active >= self._max_running
        if full and self._max_queued is not None and len(self._queue) >= self._max_queued:
            raise queue_full()
        self._queue.append(run)
        self._dispatch()
        await run.wait_for_start()

    def _dispatch(self) -> None:
        while (
            self._queue
            and self._paused is None
            and (self._max_running is None or self._active < self._max_running)
        ):
            run = self._queue.popleft()
            if run.aborted:
                continue
            run.started = True
            run.switch(self.weight_version)
            self._active += 1
            run.wake()

    async def _sample(
        self,
        entry: LoggedRequest,
        seen: PolicyRequest,
        ask: Ask,
        fault: Fault,
        run: Run,
        send: Send | None,
    ) -> dict[str, Any]:
        began = time.perf_counter()
        cache = self._caches[ask.extra_key]
        entry.cached_tokens = self._cached(cache, entry, ask)
        planned = Planned([], [], {}, "")
        try:
            reply = await self._reply(entry, seen, run)
            rng = random.Random(f"{self._seed}/{ask.routing_key}/{seen.call}")
            planned = self.speaker.plan(
                self.speaker.said(reply, rng),
                ask.params,
                self.limits.max_new_tokens(len(entry.input_ids), ask.params),
            )
            latency = self.latency(seen) if callable(self.latency) else self.latency
            run.begin(len(planned.ids), latency, self.token_latency)
            if send is not None:
                stops = [fault.abort_after, reply.hold_after if reply.hold is not None else None]
                until = min((at for at in stops if at is not None), default=None)
                await self._play_in_parts(ask, entry, planned, run, send, until=until)
            await self._play(reply, fault, planned, run)
            ids, finish, text = planned.ids, planned.finish, planned.text
        except RunAborted:
            ids = planned.ids[: run.sampled()]
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            text = self.speaker.text(ids, ask.params)
            entry.aborted = True
            self._remember_rest(entry, ids, planned.said)
        # the last token has no KV yet
        cache.insert(np.concatenate([entry.input_ids, np.array(ids[:-1], dtype=np.int32)]))
        body = answer_body(
            ask, entry, run, ids=ids, finish=finish, text=text, version=self.weight_version
        )
        body["meta_info"]["e2e_latency"] = time.perf_counter() - began
        return body

    def _cached(self, cache: PrefixCache, entry: LoggedRequest, ask: Ask) -> int:
        """The last token of a prompt is always computed, and so is every one whose logprob is
        wanted.
        """
        most = len(entry.input_ids) - 1
        if ask.return_logprob and ask.logprob_start_len >= 0:
            most = min(most, ask.logprob_start_len)
        return max(0, min(most, cache.match(entry.input_ids)))

    async def _reply(self, entry: LoggedRequest, seen: PolicyRequest, run: Run) -> Reply:
        sequence, rest = self._rests.pop(entry.routing_key, (b"", []))
        if rest and sequence == entry.input_ids.tobytes():
            return Reply(output_ids=rest)
        entry.call = seen.call
        self._calls[entry.routing_key] += 1
        said = self.policy(seen)
        reply = await run.race(said) if inspect.isawaitable(said) else said
        return reply if isinstance(reply, Reply) else Reply(reply)

    def _remember_rest(self, entry: LoggedRequest, ids: list[int], said: list[int]) -> None:
        if self._continue_aborted and said[len(ids) :]:
            sequence = entry.input_ids.tobytes() + np.array(ids, dtype=np.int32).tobytes()
            self._rests[entry.routing_key] = (sequence, said[len(ids) :])

    async def _play(self, reply: Reply, fault: Fault, planned: Planned, run: Run) -> None:
        """Let the time pass in which the tokens are sampled; raises `RunAborted`."""
        length = len(planned.ids)
        if fault.weight_version is not None:
            await run.stand_at(min(fault.switch_after, length))
            self.set_weight_version(fault.weight_version)
            run.go_on()
        if reply.hold is not None:
            await run.stand_at(min(reply.hold_after, length))
            self.held += 1
            self._notify()
            try:
                await run.race(reply.hold.wait())
            finally:
                self.held -= 1
            run.go_on()
        if fault.abort_after is not None:
            await run.stand_at(min(fault.abort_after, length))
            run.abort()
        await run.advance(length)

    async def _play_in_parts(
        self,
        ask: Ask,
        entry: LoggedRequest,
        planned: Planned,
        run: Run,
        send: Send,
        *,
        until: int | None,
    ) -> None:
        """Send what is sampled as it comes, and nothing of what an abort after `until` tokens
        cuts.
        """
        step = max(1, int(ask.params.get("stream_interval") or 1))
        end = len(planned.ids) if until is None else min(until, len(planned.ids))
        for at in range(step, end, step):
            await run.advance(at)
            ids = planned.ids[:at]
            text = self.speaker.text(ids, ask.params)
            text = text if planned.text.startswith(text) else planned.text
            body = answer_body(
                ask, entry, run, ids=ids, finish=None, text=text, version=self.weight_version
            )
            await send(orjson.dumps(body))

    def stop(self) -> None:
        """End whatever runs."""
        for run in list(self._running.values()):
            run.abort()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
