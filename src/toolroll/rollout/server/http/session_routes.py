"""The routes of the endpoint for the list of sessions, their export, metrics and documentation.

Invariant: a route that concerns all sessions requires the server's own key, not one session's key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from toolroll.rollout.server import metrics
from toolroll.rollout.server.endpoint import Endpoint
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.http import openapi
from toolroll.rollout.server.sessions.sessions import LiveSession, check_id

Only = Callable[[web.Request], str | None]


class SessionRoutes:
    """Handlers that use `endpoint`. `only` returns the only session that a request's key opens, or
    None if the key opens all sessions.
    """

    def __init__(self, endpoint: Endpoint, only: Only) -> None:
        self._endpoint = endpoint
        self._only = only

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/sessions", self._list),
            web.post("/sessions/{session}/export", self._export),
            web.get("/metrics", self._metrics),
            web.get("/openapi.json", self._openapi),
            web.get("/docs", self._docs),
        ]

    def _all(self, request: web.Request) -> None:
        """Raise `ApiError` if the key of `request` opens only one session."""
        if self._only(request) is not None:
            raise ApiError(401, "invalid_api_key", f"{request.path} needs the server's own key")

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self._all(request)
        live = [_shown(live) for live in self._endpoint.sessions.all()]
        return _json({"object": "list", "data": [*live, *self._finished()]})

    def _finished(self) -> list[dict[str, Any]]:
        store = self._endpoint.store
        return [
            {"session_id": name, "sample": sample, "finished": True, "turns": turns}
            for (name, sample), turns in (store.finished.items() if store is not None else ())
        ]

    async def _export(self, request: web.Request) -> web.StreamResponse:
        store, name = self._endpoint.store, check_id(request.match_info["session"])
        if store is None:
            words = "this server keeps no files: start it with --out FOLDER"
            raise ApiError(409, "no_folder", words)
        self._endpoint.sessions.check_open()
        live = self._endpoint.sessions.get(name)
        if live is None:
            samples = [sample for other, sample in store.finished if other == name]
            if not samples:
                self._endpoint.sessions.find(name)  # raises `ApiError`
            return _json(store.written(name, max(samples)))
        if live.pending.in_flight:
            words = f"the session has {live.pending.in_flight} requests in flight: wait for them"
            raise ApiError(409, "requests_in_flight", words, param="session_id")
        if not live.trace:
            words = f"the session {name!r} has no answer yet: there is nothing to write"
            raise ApiError(409, "session_empty", words, param="session_id")
        return _json(await self._endpoint.sessions.drop(name))

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self._all(request)
        lives = self._endpoint.sessions.all()
        text = self._endpoint.metrics.text(
            {
                "sessions": ("Live sessions.", len(lives)),
                "sessions_finished": ("Sessions in the episode file.", len(self._finished())),
                "requests_in_flight": (
                    "Requests that are not answered yet.",
                    sum(live.pending.in_flight for live in lives),
                ),
            }
        )
        return web.Response(body=text.encode(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return _json(self._document(request))

    async def _docs(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=openapi.page(self._document(request)), content_type="text/html")

    def _document(self, request: web.Request) -> dict[str, Any]:
        routes = [
            (route.method, route.resource.canonical)
            for route in request.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        ]
        return openapi.document(routes, keyed=self._endpoint.settings.api_key is not None)


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
        "lineage": {"forks": list(live.tree.forks)},
    }


def _json(data: Any) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json")
