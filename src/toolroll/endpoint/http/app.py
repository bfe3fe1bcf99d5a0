"""The HTTP server: one class whose handlers call `Endpoint`.

Invariants: every error response has the error format of the API that the request uses, a stable
code, and the header `x-should-retry`, which is true if a retry can succeed. A session can be
reached with the server's key or with the session's own key (`access`). Nothing that a client sends
becomes a file name. A session id is validated before it becomes a header of a request to the
engine. A route that concerns all sessions requires the server's own key, not one session's key.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from toolroll.endpoint.answers.result import LONG, traced
from toolroll.endpoint.conversation.messages import fork_advice
from toolroll.endpoint.dialects.dialect import Dialect
from toolroll.endpoint.endpoint import Endpoint
from toolroll.endpoint.errors import ApiError, api_error
from toolroll.endpoint.http.access import (
    check_sender,
    has_key,
    session_key,
    sessions_in_keys,
)
from toolroll.endpoint.http.json_response import JsonResponse, json_of_size
from toolroll.endpoint.metrics import CONTENT_TYPE
from toolroll.endpoint.queries import QUERIES, Query, tokenize
from toolroll.endpoint.replies import Reply
from toolroll.endpoint.requests.paths import unknown
from toolroll.endpoint.requests.received import Received, receive
from toolroll.endpoint.requests.request_bodies import RewardRequest, SessionRequest, read
from toolroll.endpoint.requests.sampling import session_defaults
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.pending import retry_number
from toolroll.endpoint.sessions.sessions import check_id
from toolroll.rollout.session.trajectory_json import to_json

logger = logging.getLogger(__name__)
_http_logger = logging.getLogger(f"{__name__}.http")

SESSION_HEADER = "x-session-id"
_RETRY_HEADER = "x-stainless-retry-count"
_ANSWERED = re.compile("/v1/|/tokenize$")
_SESSION: ContextVar[str] = ContextVar("session")
_CODE: ContextVar[str] = ContextVar("code")
_NO_ANSWER = 499
"""The status in the log if the client closed the connection before it got the answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EndpointServer:
    """Serves `endpoint` over HTTP while its `async with` block runs. The host and the port are in
    `endpoint.settings`. `url` is the address of the server. If the port in the settings is 0, `url`
    contains the port that was chosen. If the server is `managed`, only its owner creates and ends
    sessions: the key of a session opens the model alone, and a request finds no other session.
    """

    def __init__(self, endpoint: Endpoint, *, managed: bool = False) -> None:
        self.endpoint = endpoint
        self._managed = managed
        self.settings = endpoint.settings
        self.url = ""
        self._site: web.TCPSite | None = None
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EndpointServer:
        await self.endpoint.start()
        app = web.Application(middlewares=[self._logged, self._errors, self._allowed])
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_http_logger,
            auto_decompress=False,  # `receive` decompresses, with a limit
            keepalive_timeout=self.settings.receive,
            lingering_time=min(10.0, self.settings.receive),
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self.settings.host, self.settings.port, backlog=4096)
        try:
            await self._site.start()
        except OSError:
            await self.endpoint.aclose()
            await self._runner.cleanup()
            raise
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._sweeper = asyncio.create_task(self._drop_idle())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None
        assert self._site is not None
        assert self._sweeper is not None
        self._sweeper.cancel()
        await self._site.stop()  # requests on open connections now get a 503
        try:
            await self.endpoint.aclose()
        finally:
            await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port of the server."""
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    @asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve on `listener` too while the block runs."""
        assert self._runner is not None
        site = web.SockSite(self._runner, listener)
        await site.start()
        try:
            yield
        finally:
            await site.stop()

    def _routes(self) -> list[web.RouteDef]:
        routes = [
            web.get("/health", self._health),
            web.post("/sessions", self._create),
            web.get("/sessions/{session}/trajectories", self._trajectories),
            web.get("/sessions/{session}/trace", self._trace),
            web.post("/sessions/{session}/reward", self._reward),
            web.delete("/sessions/{session}", self._delete),
            web.get("/sessions", self._list),
            web.post("/sessions/{session}/export", self._export),
            web.get("/metrics", self._metrics),
        ]
        for prefix in ("", "/sessions/{session}"):
            for path, dialect in self.endpoint.dialects.items():
                routes.append(web.post(f"{prefix}/v1/{path}", partial(self._reply, dialect)))
            for (method, path), query in QUERIES.items():
                handler = partial(self._query, query)
                routes.append(web.route(method, f"{prefix}/v1/{path}", handler))
            routes.append(web.post(f"{prefix}/tokenize", partial(self._query, tokenize)))
        return routes

    async def _drop_idle(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self.settings.idle / 2))
            self.endpoint.sessions.drop_idle()

    # --- around every handler ---------------------------------------------------------------------

    @web.middleware
    async def _logged(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Log one line for each request, without keys, queries or bodies. The path is logged
        percent-encoded and the session id is validated, so that a client cannot add lines to the
        log.
        """
        began = time.perf_counter()
        status = _NO_ANSWER
        _SESSION.set("-")
        _CODE.set("")
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            seconds = time.perf_counter() - began
            self.endpoint.metrics.request(request.method, _route(request), status, seconds)
            line = (request.method, request.rel_url.raw_path, f"{status}{_CODE.get()}")
            logger.info("%s %s %s session=%s %.0f ms", *line, _SESSION.get(), seconds * 1000)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return self._refusal(_http_error(error, request), request)
        except ConnectionError:
            raise  # the client has closed the connection
        except Exception as error:  # the request's border: no other request is affected
            refusal = api_error(error)
            if refusal.code == "internal_error":
                logger.exception("a request to %s failed", request.path)
            return self._refusal(refusal, request)

    def _refusal(self, error: ApiError, request: web.Request) -> web.Response:
        """Return the response for `error`, in the error format of the API that `request` uses."""
        self.endpoint.metrics.errors[error.code] += 1
        _CODE.set(f" {error.code}")
        dialect = self.endpoint.dialect_of(request.rel_url.raw_path)
        headers = {"x-should-retry": "true" if error.retry else "false"}
        return JsonResponse(dialect.refusal(error), status=error.status, headers=headers)

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self.settings.api_key
        if key is None:
            check_sender(request)
        elif request.path != "/health":
            session_id = self._named(request)
            owned = session_id is not None and has_key(request, session_key(key, session_id))
            if not (has_key(request, key) or owned):
                raise ApiError(
                    401,
                    "invalid_api_key",
                    "the key is missing, is wrong, or belongs to another session",
                )
            if self._managed and self._only(request) and not _ANSWERED.search(request.path):
                raise ApiError(403, "forbidden", "this key opens only the model")
        return await handler(request)

    def _only(self, request: web.Request) -> str | None:
        """Return the id of the session if the request's key opens only this session. Return None if
        the request has the server's own key, or if no key is needed.
        """
        key = self.settings.api_key
        return None if key is None or has_key(request, key) else self._named(request)

    def _named(self, request: web.Request) -> str | None:
        """Return the name of the session in the path, the key or the header. Return None if none of
        them names a session.

        The path and the key take precedence over the header, because some programs set the header
        for their own purposes.
        """
        in_keys = sessions_in_keys(request, keyed=self.settings.api_key is not None)
        named = {request.match_info.get("session"), *in_keys} - {None}
        if len(named) > 1:
            problem = "the path and the keys name more than one session"
            raise ApiError(400, "invalid_session_id", problem, param="session_id")
        name = next(iter(named), None) or request.headers.get(SESSION_HEADER)
        if not name:
            return None
        session_id = check_id(name)
        _SESSION.set(session_id)
        return session_id

    # --- completions ------------------------------------------------------------------------------

    async def _reply(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        reply = await self._start(dialect, request)
        reply.live.pending.join(reply)
        try:
            if reply.parsed.request.stream:
                return await self._stream(request, reply)
            await asyncio.wait([reply.task])
            await reply.deliver()
            return JsonResponse(reply.render(), headers={SESSION_HEADER: reply.live.id})
        finally:
            reply.live.pending.leave(reply)

    async def _start(self, dialect: Dialect, request: web.Request) -> Reply:
        """Start the reply to `request`. The decoded body is freed afterwards, because it contains
        the whole conversation and is not needed while the engine samples.
        """
        body = await receive(request, self.settings)
        await self.endpoint.refresh()
        live = self._live(request, body.data)
        retry = retry_number(request.headers.get(_RETRY_HEADER))
        reply = await self.endpoint.start_reply(dialect, live, body, retry=retry)
        _SESSION.set(reply.live.id)
        return reply

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        await reply.opened()
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**headers, SESSION_HEADER: reply.live.id})
        await response.prepare(request)
        async for line in reply.event_lines():
            await response.write(line)
        await response.write_eof()
        return response

    async def _query(
        self, answer: Callable[[Query], Awaitable[Any]], request: web.Request
    ) -> web.StreamResponse:
        has_body = request.method == "POST"
        body = await receive(request, self.settings) if has_body else Received({})
        names = [value for name, value in request.match_info.items() if name != "session"]
        live = partial(self._live, request, body.data)
        return JsonResponse(await answer(Query(self.endpoint, body, "".join(names), live)))

    def _live(self, request: web.Request, body: dict[str, Any]) -> LiveSession:
        """Return the session that the path, header, key or body names, or a new one that others
        cannot find yet. If none is named, return a new unnamed one, or raise `ApiError` if requests
        must name one.
        """
        named = self._named(request)
        in_body = body.get("session_id")
        if in_body is not None and named is not None and in_body != named:
            raise ApiError(
                400,
                "invalid_session_id",
                "the body names a different session from the path, the header or the key",
                param="session_id",
            )
        if in_body is not None and self._only(request) not in (None, in_body):
            raise ApiError(401, "invalid_api_key", "the key belongs to another session")
        session_id = named or in_body
        if session_id is not None:
            _SESSION.set(check_id(str(session_id)))
            sessions = self.endpoint.sessions
            return (sessions.find if self._managed else sessions.of)(str(session_id))
        if self.settings.require_session:
            address = f"{request.scheme}://{request.host}/sessions/NAME{request.path}"
            problem = f"--require-session: the request names no session: send it to {address}"
            raise ApiError(400, "session_required", problem, param="session_id")
        return self.endpoint.sessions.new_unnamed()

    # --- the model --------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.StreamResponse:
        model, sessions = self.endpoint.model_name, len(self.endpoint.sessions)
        return JsonResponse({"status": "ok", "model": model, "sessions": sessions})

    # --- sessions ---------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = (await receive(request, self.settings)).data if request.can_read_body else {}
        parsed = read(SessionRequest, body, ignored=False)
        only = self._only(request)
        if only is not None and parsed.session_id != only:
            raise ApiError(
                401, "invalid_api_key", "the key of a session cannot create other sessions"
            )
        params = session_defaults(parsed.sampling_params)
        live = self.endpoint.sessions.create(parsed.session_id or uuid.uuid4().hex, params)
        if live.log is not None:
            await live.log.saved()
        created = {
            "session_id": live.id,
            "base_url": f"{request.scheme}://{request.host}/sessions/{live.id}/v1",
        }
        if self.settings.api_key is not None:
            created["api_key"] = session_key(self.settings.api_key, live.id)
        return JsonResponse(created, status=201)

    def _found(self, request: web.Request) -> LiveSession:
        """Return the session that the path names. Raise `ApiError` if it does not exist."""
        live = self.endpoint.sessions.find(request.match_info["session"])
        _SESSION.set(live.id)
        return live

    async def _trajectories(self, request: web.Request) -> web.StreamResponse:
        live = self._found(request)
        await self.endpoint.settle(live)
        trajectories = live.session.trajectories()
        state = {
            "session_id": live.id,
            "reward": live.reward,
            "info": live.info,
            "forks": live.tree.forks,
            "mismatches": dict(live.mismatches),
            "ignored_fields": dict(live.ignored_fields),
            "in_flight": live.pending.in_flight,
        }
        large = sum(len(trajectory.input_ids) for trajectory in trajectories) > LONG
        return await json_of_size(
            lambda: {**state, "trajectories": list(map(to_json, trajectories))}, large=large
        )

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        live = self._found(request)
        await self.endpoint.settle(live)
        paths = [live.session.path_ids(node.parent) for node, _ in live.trace]
        entries = list(zip(live.trace, paths, strict=True))
        large = sum(map(len, paths)) + sum(node.stop - node.start for node, _ in live.trace) > LONG
        return await json_of_size(
            lambda: {"session_id": live.id, "trace": [traced(*entry) for entry in entries]},
            large=large,
        )

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        body = await receive(request, self.settings)
        parsed = read(RewardRequest, body.data, ignored=False)
        live = self._found(request)  # only now, because it may have ended while the body arrived
        live.check()
        live.reward, live.info = parsed.reward, parsed.info
        if live.log is not None:
            await live.log.reward(parsed.reward, parsed.info)
        return JsonResponse({"session_id": live.id, "reward": live.reward})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        session_id = request.match_info["session"]
        written = await self.endpoint.sessions.drop(session_id)
        _SESSION.set(session_id)
        return JsonResponse({**(written or {"session_id": session_id}), "deleted": True})

    # --- all sessions -----------------------------------------------------------------------------

    def _all(self, request: web.Request) -> None:
        """Raise `ApiError` if the key of `request` opens only one session."""
        if self._only(request) is not None:
            raise ApiError(401, "invalid_api_key", f"{request.path} needs the server's own key")

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self._all(request)
        live = [_shown(live) for live in self.endpoint.sessions.all()]
        return JsonResponse({"object": "list", "data": [*live, *self._finished()]})

    def _finished(self) -> list[dict[str, Any]]:
        store = self.endpoint.store
        return [
            {"session_id": name, "sample": sample, "finished": True, "turns": turns}
            for (name, sample), turns in (store.finished.items() if store is not None else ())
        ]

    async def _export(self, request: web.Request) -> web.StreamResponse:
        store, name = self.endpoint.store, check_id(request.match_info["session"])
        if store is None:
            problem = "this server keeps no files: start it with --out FOLDER"
            raise ApiError(409, "no_folder", problem)
        self.endpoint.sessions.check_open()
        live = self.endpoint.sessions.get(name)
        if live is None:
            samples = [sample for session, sample in store.finished if session == name]
            if not samples:
                self.endpoint.sessions.find(name)  # raises `ApiError`
            return JsonResponse(store.written(name, max(samples)))
        if live.pending.in_flight:
            problem = f"the session has {live.pending.in_flight} requests in flight: wait for them"
            raise ApiError(409, "requests_in_flight", problem, param="session_id")
        if not live.trace:
            problem = f"the session {name!r} has no answer yet: there is nothing to write"
            raise ApiError(409, "session_empty", problem, param="session_id")
        return JsonResponse(await self.endpoint.sessions.drop(name))

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self._all(request)
        lives, cached = self.endpoint.sessions.all(), self.endpoint.model_info.session_cache is True
        text = self.endpoint.metrics.text(
            {
                "sessions": ("Live sessions.", len(lives)),
                "sessions_finished": ("Sessions in the episode file.", len(self._finished())),
                "requests_in_flight": (
                    "Requests that are not answered yet.",
                    sum(live.pending.in_flight for live in lives),
                ),
                "session_cache": ("1 if the engine keeps the prefixes of sessions.", int(cached)),
                "sessions_held": ("Sessions held back.", self.endpoint.model.admission.held),
            }
        )
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def _http_error(error: web.HTTPException, request: web.Request) -> ApiError:
    codes = {405: "method_not_allowed", 413: "body_too_large"}
    problem = error.text or error.reason
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return ApiError(426, "upgrade_required", "use HTTP")  # then Codex does so at once
    if error.status == 404:
        return ApiError(404, "not_found", unknown(request.rel_url.raw_path))
    if isinstance(error, web.HTTPMethodNotAllowed):
        problem = (
            f"{request.path!r} is not served for {request.method!r}: use "
            f"{' or '.join(sorted(error.allowed_methods))}"
        )
    return ApiError(error.status, codes.get(error.status, "http_error"), problem)


def _route(request: web.Request) -> str:
    """Return the path pattern of the route of `request`, such as `/sessions/{session}/reward`.
    Return "other" if no route matches.
    """
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _shown(live: LiveSession) -> dict[str, Any]:
    return {
        "session_id": live.id,
        "sample": live.sample,
        "finished": False,
        "turns": len(live.trace),
        "tokens": live.session.tokens,
        "in_flight": live.pending.in_flight,
        "reward": live.reward,
        "created": live.created,
        "forks": list(live.tree.forks),
        "ignored_fields": dict(live.ignored_fields),
        "fork_advice": fork_advice(live.tree.forks),
    }


def _one_line(record: logging.LogRecord) -> bool:
    """Log a malformed request as one line at INFO. Leave other records unchanged."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        first = str(error.message).strip().partition("\n")[0]
        record.msg, record.args = "%s: %s %s", (record.getMessage(), error.code, first)
        record.exc_info, record.exc_text = None, None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


_http_logger.addFilter(_one_line)
