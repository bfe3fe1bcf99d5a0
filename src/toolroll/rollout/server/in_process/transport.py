"""`InProcessTransport`: answers the OpenAI SDK's HTTP requests with an `Endpoint` in the same event
loop, without a socket.

Invariants: answers, errors and streams come from the same code as over HTTP. An answer has logprobs
unless the request declines them. Cancelling a call has the same effect as closing a connection: a
retry can join the request until the grace time ends. No network is used.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections.abc import AsyncIterator
from functools import cached_property, partial
from typing import Any

import orjson

from toolroll.rollout.server.answers.result import CompletionResult
from toolroll.rollout.server.dialects.dialect import ParsedRequest
from toolroll.rollout.server.dialects.openai_responses import not_found
from toolroll.rollout.server.endpoint import Endpoint, Starter, model_card
from toolroll.rollout.server.errors import ApiError, api_error
from toolroll.rollout.server.in_process.responses import ExactResponses
from toolroll.rollout.server.requests.received import decoded
from toolroll.rollout.server.sessions.pending import PendingRequest, retry_number
from toolroll.rollout.server.sessions.sessions import LiveSession
from toolroll.rollout.server.streaming import event_lines, opened
from toolroll.rollout.server.tokenizing import tokenize

logger = logging.getLogger(__name__)

BASE = "http://toolroll.invalid"
"""A host name that cannot be resolved. If a request bypasses this transport, it fails."""
_PATH = re.compile(r"(?:/sessions/(?P<session>[^/]+))?/v1/(?P<what>.+)")


class InProcessTransport:
    """A transport for the `http_client` of `openai.AsyncOpenAI`. It works with httpx and with the
    HTTP library that newer SDKs use instead.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __aenter__(self) -> InProcessTransport:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def aclose(self) -> None:
        """Do nothing, because no connection is open."""

    async def handle_async_request(self, request: Any) -> Any:
        """Answer a request of the SDK.

        `request` and the returned response are objects of the HTTP library that the SDK uses.
        """
        http = importlib.import_module(type(request).__module__.partition(".")[0])
        try:
            return await self._answer(http, request)
        except http.TimeoutException:
            # the SDK's timeout: the SDK retries, and its retry joins this request
            raise
        except Exception as error:  # the endpoint's border: a response, as over HTTP
            found = api_error(error)
            if found.code == "internal_error":
                logger.exception("a request to %s failed", request.url.path)
            headers = {"x-should-retry": "true" if found.retry else "false"}
            dialect = self._endpoint.dialect_of(request.url.path)
            return _json(http, dialect.refusal(found), found.status, headers)

    @cached_property
    def _responses(self) -> ExactResponses:
        plain = self._endpoint.responses
        return ExactResponses(
            plain.encoder, plain.templates, plain.settings, plain.model, plain.reasons
        )

    async def _answer(self, http: Any, request: Any) -> Any:
        match = _PATH.fullmatch(request.url.path)
        what = match["what"] if match else ""
        await self._endpoint.refresh()
        if request.method == "GET" and what == "models":
            return _json(http, {"object": "list", "data": [model_card(self._endpoint)]})
        if request.method == "GET" and what == f"models/{self._endpoint.model}":
            return _json(http, model_card(self._endpoint))
        if request.method == "GET" and match is not None and what.startswith("responses/"):
            return self._stored_response(http, match["session"], what.partition("/")[2])
        if request.method == "POST" and what == "tokenize":
            body = await decoded(await request.aread(), settings=self._endpoint.settings)
            return _json(http, await tokenize(self._endpoint, body))
        starters: dict[str, Starter] = {
            "chat/completions": partial(self._endpoint.start_reply, self._endpoint.chat),
            "completions": self._endpoint.start_text,
            "responses": partial(self._endpoint.start_reply, self._responses),
        }
        ask = starters.get(what)
        if ask is None or match is None or request.method != "POST":
            raise ApiError(
                404, "not_found", f"{request.method} {request.url.path} is not served in process"
            )
        body = await decoded(await request.aread(), settings=self._endpoint.settings)
        if what != "responses":  # they have these fields without being asked
            _ask_for_tokens(body.data, chat=what == "chat/completions")
        sessions, session = self._endpoint.sessions, match["session"]
        live = sessions.of(session) if session is not None else sessions.ephemeral()
        live, parsed, pending = await ask(
            live, body, retry=retry_number(request.headers.get("x-stainless-retry-count"))
        )
        limit = request.extensions.get("timeout", {}).get("read")
        live.pending.join(pending)
        if parsed.request.stream:
            return await self._stream(http, live, parsed, pending)
        try:
            done, _ = await asyncio.wait([pending.task], timeout=limit)
            if not done:
                raise http.ReadTimeout(f"no answer within {limit} s", request=request)
            result = await self._endpoint.commit(pending)
            return http.Response(
                200, headers={"Content-Type": "application/json"}, content=result.body
            )
        finally:
            live.pending.leave(pending)

    def _stored_response(self, http: Any, session: str | None, response_id: str) -> Any:
        live = self._endpoint.sessions.get(session) if session is not None else None
        stored = live.responses.get(response_id) if live is not None else None
        if stored is None:
            raise not_found(response_id)
        return http.Response(200, headers={"Content-Type": "application/json"}, content=stored.body)

    async def _stream(
        self,
        http: Any,
        live: LiveSession,
        parsed: ParsedRequest,
        pending: PendingRequest[CompletionResult],
    ) -> Any:
        try:
            await opened(self._endpoint, pending)
        except BaseException:
            live.pending.leave(pending)
            raise
        lines = _Lines(event_lines(self._endpoint, parsed, pending), live, pending)
        return http.Response(
            200, headers={"Content-Type": "text/event-stream"}, stream=_byte_stream(http, lines)
        )


def _ask_for_tokens(data: dict[str, Any], *, chat: bool) -> None:
    """Add the fields that request logprobs and all token ids to `data`, unless `data` sets these
    fields. (`logprobs: false` is kept.) Code that was written for Atropos or verifiers reads
    logprobs and ids without requesting them.
    """
    wanted = {"logprobs": True if chat else 0, **({} if chat else {"return_token_ids": True})}
    data |= {name: value for name, value in wanted.items() if data.get(name) is None}


class _Lines:
    """The lines of a stream. `hang_up` says that the client no longer waits for the stream. Only
    the first call has an effect.
    """

    def __init__(
        self,
        lines: AsyncIterator[bytes],
        live: LiveSession,
        pending: PendingRequest[CompletionResult],
    ) -> None:
        self.lines = lines
        self._live = live
        self._pending: PendingRequest[CompletionResult] | None = pending

    def hang_up(self) -> None:
        if self._pending is not None:
            self._live.pending.leave(self._pending)
            self._pending = None


def _byte_stream(http: Any, lines: _Lines) -> Any:
    """Return `lines` as a stream of the HTTP library, because the library's client requires one."""

    class EventStream(http.AsyncByteStream):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for line in lines.lines:
                    yield line
            finally:
                lines.hang_up()

        async def aclose(self) -> None:
            lines.hang_up()

    return EventStream()


def _json(http: Any, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    return http.Response(
        status,
        headers={"Content-Type": "application/json", **(headers or {})},
        content=orjson.dumps(data),
    )
