"""`Engine`: a client of SGLang's `/generate`, directly or through a router.

Invariants:

- A prompt is sent only if each of its ids is in the vocabulary or was sampled by the engine. Any
  other id would crash the engine.
- A prompt that leaves no room for an answer is never sent, because ten such requests open a
  router's circuit breaker.
- Each attempt has a new request id (`rid`), because SGLang refuses a duplicate `rid`. All `rid`s
  have the same length, because an abort ends every request whose `rid` starts with the given one.
- A failure is retried only if another attempt may succeed, and only until the deadline.
- A request that may still be running is aborted at the engine before the next attempt, and if the
  caller is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import orjson

from toolroll.rollout.engine.control_plane import ControlPlane
from toolroll.rollout.engine.engine_client import EncodedRequest, EngineClient
from toolroll.rollout.engine.engine_config import EngineConfig
from toolroll.rollout.engine.errors import Failure, foreign, from_exception, from_response
from toolroll.rollout.engine.health import Health
from toolroll.rollout.engine.model_info import ModelInfo
from toolroll.rollout.engine.outage import Outage, Sleep
from toolroll.rollout.engine.response import check_ids, parse_completion
from toolroll.rollout.engine.retries import Backoff, Retries
from toolroll.rollout.engine.sampling_params import check_dropped, request_fields
from toolroll.rollout.engine.session_cache import CachedSession, SessionCache
from toolroll.rollout.engine.stream import EventReader, Progress
from toolroll.rollout.engine.transport import (
    NETWORK_ERRORS,
    Answer,
    Transport,
    whole,
)
from toolroll.rollout.errors import (
    CompletionError,
    EngineError,
    TokenError,
    UsageError,
    capped,
    prompt_too_long,
)
from toolroll.rollout.media import collapsed
from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.runtime.param_names import check_params, sent_unchecked
from toolroll.rollout.runtime.time_limit import not_counted
from toolroll.rollout.types import Completion, GenerateRequest, IdArray

logger = logging.getLogger(__name__)

ROUTING_KEY: ContextVar[tuple[str, str]] = ContextVar("toolroll_routing_key", default=("", ""))
"""The session id of the running episode, and the key by which a router chooses its worker. The
requests of other sessions have their session id as the key. It names the session because a server
that an episode starts gets the context of this episode for all its requests.
"""

_MAX_RETRY_AFTER = 60.0
_NO_HEADER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")


class Engine(EngineClient):
    """A client of one engine or router. Use it as an async context manager. Its calls share a pool
    of keep-alive connections, without a limit on their number.
    """

    takes_images = True

    def __init__(
        self,
        config: EngineConfig | str,
        *,
        model_info: ModelInfo | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.config = config if isinstance(config, EngineConfig) else EngineConfig(engine=config)
        self._transport = Transport(self.config)
        self._control_plane = ControlPlane(self.config, self._transport, model_info=model_info)
        outage = Outage(
            f"the engine at {self.url}",
            self._control_plane.probe,
            timeout=self.config.engine_timeout,
            sleep=sleep,
        )
        backoff = Backoff(self.config.retries, self.config.backoff, self.config.max_backoff)
        self._retries = Retries(outage, backoff, sleep=sleep)
        self._in_flight: set[str] = set()
        # The sampled ids that the tokenizer does not have. A model has more embedding rows than its
        # tokenizer has tokens, and an untrained policy may sample these extra ids.
        self._padding_sampled: set[int] = set()
        self._unknown_params: set[str] = set()
        # layers * top_k. Answers do not contain it, so the first one must have all rows.
        self._experts_per_token: int | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._sessions = SessionCache(self._close_session, self.url)

    @property
    def url(self) -> str:
        """The address of the engine or router, without `/generate`."""
        return self.config.engine

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for the aborts in flight and for the sessions that are being closed, then close the
        connections. Requests in flight fail and are not retried.
        """
        await self._retries.aclose()
        for _ in range(2):  # what the requests in flight leave opens new connections
            await self._settle()
            await self._transport.close()

    async def _settle(self) -> None:
        while self._aborts:
            await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._sessions.settle()

    # --- generate ---------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Sample one turn and return it.

        If `progress` is given, the answer is streamed, and each call of `progress` gets all ids
        sampled so far. A stream that breaks after its first token is not retried. If the engine
        aborts the request, the `Completion` has finish_reason "abort" and the ids sampled until
        then.

        Raises:
            ContextOverflowError: The prompt leaves no room for an answer.
            TokenError: The prompt is empty, or contains an id outside the vocabulary.
            UsageError: A sampling parameter is misspelled or dropped by the router, or the session
                id is not one line of text.
            CompletionError: The answer is not a valid answer to `request`.
            EngineUnreachableError: `engine_timeout` is set, and the engine has not answered for
                that many seconds.
            EngineError: Any other failure, after the retries.
        """
        info = await self._check(request)
        vocab_size = info.sampled_limit
        check = partial(check_ids, request=request, vocab_size=vocab_size)
        began = perf_counter()
        outcome, attempts = await self._retries.send(
            partial(self._attempt, request, progress, check), seconds=self.config.deadline
        )
        latency = perf_counter() - began
        if isinstance(outcome, Failure):
            raise _raised(outcome, attempts, self.url)
        rid, answer = outcome
        completion = parse_completion(
            answer,
            request,
            rid=rid,
            vocab_size=vocab_size,
            experts_per_token=self._experts_per_token,
        )
        completion = replace(completion, latency=latency, attempts=attempts)
        self._take(completion, info)
        return completion

    def _take(self, completion: Completion, info: ModelInfo) -> None:
        """Remember the sampled ids that the tokenizer does not have. Raise `CompletionError` if the
        routed experts are missing.
        """
        sampled = completion.output_ids
        if not len(sampled):
            return
        if completion.routed_experts is not None:
            self._experts_per_token = completion.routed_experts.shape[1]
        elif self.config.return_routed_experts and completion.finish_reason == "abort":
            raise CompletionError(
                "the engine aborted a turn that it had retracted before, and no longer has the "
                "experts of its sampled tokens"
            )
        elif self.config.return_routed_experts:
            raise CompletionError(
                "return_routed_experts is set, but the engine sent no routed experts: start SGLang "
                "with --enable-return-routed-experts, and connect to it directly or through "
                "smg (sglang-router drops return_routed_experts)"
            )
        vocab_size = info.vocab_size
        if vocab_size is not None and sampled.max() >= vocab_size:
            self._padding_sampled.update(index for index in sampled.tolist() if index >= vocab_size)

    async def _check(self, request: GenerateRequest) -> ModelInfo:
        """Return the model info. Raise an error if `request` must not be sent."""
        info = await self._control_plane.model_info()
        ids = request.input_ids
        if not len(ids):
            raise TokenError("the prompt is empty")
        vocab_size = np.iinfo(np.int32).max if info.vocab_size is None else info.vocab_size
        # Negative ids are very high if they are read as unsigned numbers. So one maximum finds both
        # negative ids and ids that are too high.
        highest = int(np.maximum.reduce(np.asarray(ids, dtype=np.int32).view(np.uint32)))
        if highest >= vocab_size:
            for position in np.flatnonzero((ids < 0) | (ids >= vocab_size)).tolist():
                if int(ids[position]) not in self._padding_sampled:
                    raise TokenError(
                        f"input_ids[{position}] is {ids[position]}, outside the vocabulary of "
                        f"{vocab_size}: this would crash the engine. Is this the served model's "
                        f"tokenizer?"
                    )
        limit = info.prompt_limit
        if limit is not None and len(ids) >= limit:
            raise prompt_too_long(len(ids), limit - 1)
        if _NO_HEADER.search(request.session_id):
            raise UsageError(
                f"the session id {request.session_id!r} cannot be sent as a header: it must be a "
                f"single line of text"
            )
        unknown = check_params(request.sampling_params)
        check_dropped(request.sampling_params, self._control_plane.dropped)
        for name in unknown - self._unknown_params:
            logger.warning("%s", sent_unchecked(name))
        self._unknown_params |= unknown
        return info

    def _body(
        self,
        request: GenerateRequest,
        rid: str,
        *,
        stream: bool,
        session: CachedSession | None = None,
    ) -> bytes:
        """Return the JSON to send."""
        other_fields = orjson.dumps(
            {
                **request_fields(request.sampling_params),
                "return_logprob": request.return_logprob,
                "stream": stream,
                "rid": rid,
                **({"session_id": session.id} if session is not None else {}),
                **(self._experts_fields(request) if self.config.return_routed_experts else {}),
                **(_image_fields(request) if request.images else {}),
                **request.extra,
            }
        )
        if request.images:  # the engine repeats each placeholder itself
            ids = ids_json(collapsed(request.input_ids, request.images))
        elif isinstance(request, EncodedRequest):
            ids = request.input_ids_json
        else:
            ids = ids_json(request.input_ids)
        return b"".join((b'{"input_ids":[', ids, b"],", memoryview(other_fields)[1:]))

    def _experts_fields(self, request: GenerateRequest) -> dict[str, Any]:
        start = 0 if self._experts_per_token is None else request.routed_experts_start
        return {"return_routed_experts": True, "routed_experts_start_len": start}

    async def _attempt(
        self,
        request: GenerateRequest,
        progress: Progress | None,
        check: Callable[[Any], object],
        remaining: float,
    ) -> tuple[str, Mapping[str, Any]] | Failure:
        """Send `request` once, with at most `remaining` seconds. Return the attempt's id and the
        answer.
        """
        rid = os.urandom(16).hex()
        events = None if progress is None else EventReader(progress, rid, check)
        seconds = min(max(remaining, 0.001), self.config.attempt_timeout)
        session = None
        if self._control_plane.session_cache:
            session = self._sessions.enter(request.session_id)
        closings = self._retries.closings
        self._in_flight.add(rid)
        try:
            sent = self._body(request, rid, stream=events is not None, session=session)
            outcome = await self._posted(sent, request, seconds, events)
            if not isinstance(outcome, Failure):
                outcome = foreign(outcome, rid) or outcome
            if not isinstance(outcome, Failure):
                return rid, outcome
            if outcome.running and self._retries.closings == closings:
                if not outcome.lost:  # otherwise the outage is logged
                    logger.warning(
                        "%s: request %s of session %s is aborted: %s",
                        self.url, rid, request.session_id, capped(outcome.message),
                    )  # fmt: skip
                # Without the abort, the engine would sample both the request and its retry.
                with not_counted():
                    await self.abort(rid)
        except (asyncio.CancelledError, UsageError):
            self._abort_later(rid)
            raise
        finally:
            self._in_flight.discard(rid)
            if session is not None:
                self._sessions.leave(session)
        if events is not None and events.started:
            return outcome.final()  # `progress` has its tokens, another attempt would sample others
        starting = outcome.status == 503 and not self._retries.outage.started
        return replace(
            outcome,
            lost=outcome.lost or starting,
            retry_after=min(outcome.retry_after or 0.0, _MAX_RETRY_AFTER),
        )

    async def _posted(
        self, sent: bytes, request: GenerateRequest, seconds: float, events: EventReader | None
    ) -> Mapping[str, Any] | Failure:
        """Post the request. Return its answer, which `events` reads if it is a stream."""
        session, key = ROUTING_KEY.get()
        if session != request.session_id or not self._control_plane.routed:
            key = request.session_id
        posted = self._transport.generate(sent, key, seconds=seconds)
        try:
            async with await posted as response:
                if (
                    events is not None
                    and response.status == 200
                    and response.content_type == "text/event-stream"
                ):
                    return await events.read(response.content.iter_any())
                answer = await whole(response)
        except NETWORK_ERRORS as error:
            return from_exception(error)
        return _checked(answer)

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Post `payload` unchanged and without retries. Return the JSON of the answer.

        Raise `EngineError` if there is no answer, or if its status is not 200, and `UsageError` if
        the router is known to drop a sampling parameter.
        """
        if url == f"{self.url}/generate":
            params = payload.get("sampling_params") or {}
            for item in [params] if isinstance(params, Mapping) else params:  # SGLang takes a list
                check_dropped(item, self._control_plane.dropped)
        data = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            answer = await self._transport.ask(url, data, seconds=self.config.attempt_timeout)
        except NETWORK_ERRORS as error:
            raise _raised(from_exception(error), 1, url) from error
        body = _checked(answer)
        if isinstance(body, Failure):
            raise _raised(body, 1, url)
        return dict(body)

    async def get(self, url: str) -> Any:
        """Return the JSON at `url`, or None if the request fails or the answer is not JSON."""
        return (await self._control_plane.ask(url))[0]

    # --- aborts -----------------------------------------------------------------------------------

    async def abort(self, rid: str) -> None:
        """Abort one request at every worker, because routers do not forward aborts.

        A failure is only logged.
        """
        await self._control_plane.abort(rid)

    async def abort_all(self) -> None:
        """Abort the requests that this client has in flight, and no others."""
        await asyncio.gather(*(self.abort(rid) for rid in list(self._in_flight)))

    def _abort_later(self, rid: str) -> None:
        """Abort a request in a separate task, so that its cancelled caller does not wait."""
        task = asyncio.get_running_loop().create_task(self.abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    # --- sessions ---------------------------------------------------------------------------------

    def open_session(self, session_id: str) -> Callable[[], None]:
        """Let the engine's cache keep the prefixes of the session's requests, if it can. Return the
        function that ends this.
        """
        return self._sessions.open(session_id)

    def allow_sampled(self, ids: IdArray) -> None:
        """Allow `ids` in prompts: the engine sampled them in an earlier process."""
        self._padding_sampled.update(ids.tolist())

    def keep_sessions(self, folder: Path) -> None:
        """Keep the ids of open sessions in `folder`, for `close_left_sessions`."""
        self._sessions.keep(folder)

    async def close_left_sessions(self, folder: Path) -> int:
        """Close the sessions that killed processes left open at the engine, by the files in
        `folder`. Return their number.
        """
        return await self._sessions.close_left(folder)

    async def _close_session(self, session_id: str) -> bool:
        # An aborted request marks nothing, but one that ends before its abort arrives would.
        await asyncio.gather(*self._aborts, return_exceptions=True)
        return await self._control_plane.close_session(session_id)

    # --- the control plane ------------------------------------------------------------------------

    async def workers(self) -> list[str]:
        """Return the workers' addresses: the ones that a router lists, or the engine's own."""
        return await self._control_plane.workers()

    async def dropped_params(self) -> frozenset[str]:
        """Return the sampling parameters that the router in front of the engine silently drops."""
        await self.workers()
        return self._control_plane.dropped

    async def model_info(self) -> ModelInfo:
        """Return the context length, the vocabulary size and the weight version.

        Values that the configuration sets take precedence over the values that the engine reports.
        """
        return await self._control_plane.model_info()

    async def check_model(self) -> None:
        """Raise `UsageError` if the engine now serves a different model."""
        await self._control_plane.ask_model()

    async def wait_until_healthy(self) -> Health:
        """Wait up to `engine_timeout` seconds until the engine can answer. Return the last health
        check. Raise `EngineUnreachableError` if the engine is still down after that time, and
        `UsageError` if it no longer serves the same model.
        """
        return await self._retries.outage.wait_until_healthy()

    async def health(self) -> Health:
        """Return whether the engine can answer, and if not, why."""
        return await self._control_plane.health()


def _checked(answer: Answer) -> Mapping[str, Any] | Failure:
    """Return the JSON of `answer`, or the failure that it reports."""
    if answer.status != 200:
        return from_response(answer.status, answer.body, retry_after=answer.retry_after)
    return _decoded(answer.body)


def _image_fields(request: GenerateRequest) -> dict[str, Any]:
    urls = [image.url for image in request.images]
    return {"image_data": urls, "return_prompt_token_ids": True}


def _decoded(body: bytes) -> Mapping[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CompletionError(
            f"the engine's answer is not JSON: {error}: {body[:200]!r}"
        ) from error
    if isinstance(data, list) and len(data) == 1:
        data = data[0]
    if not isinstance(data, dict):
        raise CompletionError(f"the engine's answer is not a JSON object: {body[:200]!r}")
    return data


def _raised(failure: Failure, attempts: int, url: str) -> EngineError:
    fields: Any = {"status": failure.status, "body": failure.body, "attempts": attempts}
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    message = f"{url}: {failure.message}{tries}"
    if failure.overflow is not None:
        return prompt_too_long(*failure.overflow, message, **fields)
    return EngineError(message, **fields)
