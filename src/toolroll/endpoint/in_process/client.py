"""`ToolrollClient`: the OpenAI SDK's own asynchronous client, whose requests are answered in
process. `InProcessTransport` answers its HTTP requests with an `Endpoint` in the same event loop,
without a socket.

Invariants:

- The client is an `openai.AsyncOpenAI`, with that class's retries, streams, types and errors. A
  copy of a client uses the same session by default. `reset` moves a client to another session and
  keeps the tokens of the previous one.
- Answers, errors and streams come from the same code as over HTTP. An answer has logprobs unless
  the request declines them. Cancelling a call has the same effect as closing a connection: a retry
  can join the request until the grace time ends. No network is used.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
import uuid
from collections.abc import AsyncIterator
from functools import cache, cached_property, partial, wraps
from typing import Any

import orjson
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.resources.chat import AsyncChat
from openai.resources.completions import AsyncCompletions as AsyncTextCompletions

from toolroll.endpoint.answers.result import (
    CompletionResult,
    chat_logprobs,
    constraint,
    exact,
    is_long,
    prompt_token_ids,
)
from toolroll.endpoint.conversation.stored_response import ResponseStore
from toolroll.endpoint.dialects.dialect import Dialect, Event, ParsedRequest
from toolroll.endpoint.dialects.openai_responses import OpenAIResponses
from toolroll.endpoint.dialects.openai_responses_writer import ResponsesWriter
from toolroll.endpoint.endpoint import Endpoint
from toolroll.endpoint.errors import ApiError, api_error
from toolroll.endpoint.queries import QUERIES, Query
from toolroll.endpoint.replies import Reply
from toolroll.endpoint.requests.received import Received, decoded
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.pending import retry_number
from toolroll.endpoint.sessions.sessions import check_id
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Trajectory

logger = logging.getLogger(__name__)

BASE = "http://toolroll.invalid"
"""A host name that cannot be resolved. If a request bypasses this transport, it fails."""
_PATH = re.compile(r"(?:/sessions/([^/]+))?/v1/(.+)")
_GROUP = re.compile(r"\{\w+:?(.*)\}")
"""The part of a path in `QUERIES` that names one object."""


class ToolrollClient(AsyncOpenAI):
    """An `AsyncOpenAI` whose requests `endpoint` answers. `endpoint` must be started. `session` is
    the name of the client's session (default: a generated name).

    Replies have logprobs unless you set `logprobs=False`. They have the extra fields
    `prompt_token_ids`, `choices[i].token_ids` and `choices[i].logprobs.content[j].token_id`. In
    text completions, each choice also has `prompt_token_ids`. A response of `responses.create` has
    `prompt_token_ids`, `token_ids` and `logprobs["content"]` itself. `model` is optional.
    `post("/tokenize")` works too. `options` are the arguments of `AsyncOpenAI`. Put sampling
    parameters that the SDK does not know into `extra_body`.
    """

    def __init__(self, endpoint: Endpoint, *, session: str | None = None, **options: Any) -> None:
        self.endpoint = endpoint
        self.session = _name(session)
        if options.get("http_client") is None:
            # works with any HTTP library, because the SDK replaced its own between two versions
            transport: Any = InProcessTransport(endpoint)
            # with trust_env, a proxy in the environment would be used instead of the transport
            options["http_client"] = DefaultAsyncHttpxClient(transport=transport, trust_env=False)
        super().__init__(**{"api_key": "in-process", **options, "base_url": _address(self.session)})

    @cached_property
    def chat(self) -> AsyncChat:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Chat completions; `model` is optional."""
        chat = AsyncChat(self)
        _make_model_optional(chat.completions, self.endpoint)
        return chat

    @cached_property
    def completions(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> AsyncTextCompletions:
        """Text completions; `model` is optional."""
        completions = AsyncTextCompletions(self)
        _make_model_optional(completions, self.endpoint)
        return completions

    def copy(self, *, session: str | None = None, **options: Any) -> ToolrollClient:
        """Return a copy with other `options`. By default, it uses the same session."""
        extra = {"endpoint": self.endpoint, "session": self.session if session is None else session}
        options.pop("base_url", None)
        return super().copy(_extra_kwargs=extra, **options)

    with_options = copy

    async def trajectories(self) -> tuple[Trajectory, ...]:
        """Return the session's trajectories so far. There are none before the first reply."""
        live = self.endpoint.sessions.get(self.session)
        if live is None:
            return ()
        await self.endpoint.settle(live)
        return live.session.trajectories()

    def reset(self, session: str | None = None) -> str:
        """Continue in a new session, named `session` or with a generated name. Return the name of
        the previous session, which can be read until it is dropped.
        """
        previous, self.session = self.session, _name(session)
        self.base_url = _address(self.session)
        return previous


def _name(session: str | None) -> str:
    return check_id(session) if session is not None else f"client-{uuid.uuid4().hex}"


def _address(session: str) -> str:
    return f"{BASE}/sessions/{session}/v1"


def _make_model_optional(completions: Any, endpoint: Endpoint) -> None:
    """Make `completions.create` name the model of `endpoint` if its caller names none."""
    create = completions.create

    @wraps(create)
    async def create_with_model(**kwargs: Any) -> Any:
        name = kwargs.get("model")
        return await create(**{**kwargs, "model": endpoint.model_name if name is None else name})

    completions.create = create_with_model


# --- the transport --------------------------------------------------------------------------------


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
        # The SDK's client accepts only responses, streams and errors of its own HTTP library, and
        # which library that is depends on the SDK's version.
        http = importlib.import_module(type(request).__module__.partition(".")[0])
        try:
            return await self._answer(http, request)
        except http.TimeoutException:
            # the SDK's timeout: the SDK retries, and its retry joins this request
            raise
        except Exception as error:  # the endpoint's border: a response, as over HTTP
            refusal = api_error(error)
            if refusal.code == "internal_error":
                logger.exception("a request to %s failed", request.url.path)
            headers = {"x-should-retry": "true" if refusal.retry else "false"}
            dialect = self._endpoint.dialect_of(request.url.path)
            return _json(http, dialect.refusal(refusal), refusal.status, headers)

    @cached_property
    def _dialects(self) -> dict[str, Dialect]:
        plain = self._endpoint.responses
        exact = ExactResponses(plain.encoder, plain.templates, plain.settings, plain.reasons)
        return {**self._endpoint.dialects, "responses": exact}

    async def _answer(self, http: Any, request: Any) -> Any:
        match = _PATH.fullmatch(request.url.path)
        session, path = match.groups() if match is not None else (None, "")
        raw = await request.aread()
        settings = self._endpoint.settings
        await self._endpoint.refresh()
        dialect = self._dialects.get(path) if request.method == "POST" else None
        if dialect is not None:
            body = await decoded(raw, settings=settings)
            if dialect is not self._dialects["responses"]:  # has these fields without being asked
                _ask_for_tokens(body.data, chat=path == "chat/completions")
            retry = retry_number(request.headers.get("x-stainless-retry-count"))
            reply = await self._endpoint.start_reply(
                dialect, self._live(session), body, retry=retry
            )
            return await self._reply(http, request, reply)
        for (method, pattern), answer in QUERIES.items():
            named = re.fullmatch(_GROUP.sub(lambda m: f"({m[1] or '[^/]+'})", pattern), path)
            if named is not None and method == request.method:
                body = await decoded(raw, settings=settings) if raw else Received({})
                live = partial(self._live, session)
                query = Query(self._endpoint, body, "".join(named.groups()), live)
                return _json(http, await answer(query))
        raise ApiError(
            404, "not_found", f"{request.method} {request.url.path} is not served in process"
        )

    def _live(self, session: str | None) -> LiveSession:
        sessions = self._endpoint.sessions
        return sessions.of(session) if session is not None else sessions.new_unnamed()

    async def _reply(self, http: Any, request: Any, reply: Reply) -> Any:
        pending = reply.live.pending
        pending.join(reply)
        if reply.parsed.request.stream:
            try:
                await reply.opened()
            except BaseException:
                pending.leave(reply)
                raise
            headers = {"Content-Type": "text/event-stream"}
            return http.Response(200, headers=headers, stream=_stream_type(http)(reply))
        limit = request.extensions.get("timeout", {}).get("read")
        try:
            done, _ = await asyncio.wait([reply.task], timeout=limit)
            if not done:
                raise http.ReadTimeout(f"no answer within {limit} s", request=request)
            await reply.deliver()
            return _json(http, reply.render())
        finally:
            pending.leave(reply)


def _ask_for_tokens(data: dict[str, Any], *, chat: bool) -> None:
    """Add the fields that request logprobs and all token ids to `data`, unless `data` sets these
    fields. (`logprobs: false` is kept.) Code that was written for Atropos or verifiers reads
    logprobs and ids without requesting them.
    """
    defaults = {"logprobs": True if chat else 0, **({} if chat else {"return_token_ids": True})}
    data |= {name: value for name, value in defaults.items() if data.get(name) is None}


class _EventStream:
    """The lines of `reply`. When the client stops reading, it no longer waits for `reply`."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for line in self._reply.event_lines():
                yield line
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Say that the client no longer waits. Only the first call has an effect."""
        if self._open:
            self._open = False
            self._reply.live.pending.leave(self._reply)


@cache
def _stream_type(http: Any) -> Any:
    """Return `_EventStream` as a class that the client of the HTTP library `http` accepts."""
    return type("EventStream", (_EventStream, http.AsyncByteStream), {})


def _json(http: Any, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    return http.Response(
        status,
        headers={"Content-Type": "application/json", **(headers or {})},
        content=data if isinstance(data, bytes) else orjson.dumps(data),
    )


# --- responses ------------------------------------------------------------------------------------


class ExactWriter(ResponsesWriter):
    """Writes one response, with the exact fields in the finished response."""

    async def finish(self) -> AsyncIterator[Event]:
        result = self._result
        large = is_long([result.choices[0].completion], top=0)
        sampled = await call_of_size(_sampled, result, self._encoder, large=large)
        async for event in super().finish():
            if "response" in event:
                event["response"] |= {
                    **sampled,
                    **prompt_token_ids(result),
                    **constraint(result),
                }
            yield event


class ExactResponses(OpenAIResponses):
    """`POST /v1/responses`, with the fields `prompt_token_ids`, `token_ids`, `logprobs`,
    `stop_reason` and `weight_version` in the response.
    """

    writer_type = ExactWriter

    def translate(self, data: dict[str, Any], responses: ResponseStore) -> ParsedRequest:
        """Return the request in `data`. Raise `ApiError` if it is not valid."""
        parsed = super().translate(data, responses)
        parsed.chat.logprobs = True
        return parsed

    def body(self, parsed: ParsedRequest, result: CompletionResult) -> dict[str, Any]:
        sampled = _sampled(result, self.encoder)
        return {**super().body(parsed, result), **sampled, **prompt_token_ids(result)}


def _sampled(result: CompletionResult, encoder: Encoder) -> dict[str, Any]:
    [choice] = result.choices
    return {**exact(choice), "logprobs": chat_logprobs(choice.completion, encoder, 0)}
