"""`toolroll view --follow`: serves the page of a run that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from toolroll.cli.view import page_title, pieces_by_model
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.http.access import check_sender
from toolroll.evaluation.report import read_summary
from toolroll.evaluation.viewer.page import ReadSoFar, ShownTokens, episodes_after, followed_page
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME
from toolroll.rollout.runs.run_directory import read_settings
from toolroll.rollout.runtime.event_loop import stop_signals
from toolroll.rollout.runtime.jsonable import json_bytes


async def follow(
    folder: Path,
    port: int,
    *,
    tokenizer: str | None,
    tokens: int | None,
    say: Callable[[str], None],
) -> None:
    """Serve the page of the run in `folder` on loopback until SIGINT or SIGTERM. If the run has not
    started, wait for it. `say` prints the page's address, and messages for the user. `tokenizer`,
    `tokens`: as for `view`.
    """
    stop = asyncio.Event()
    with stop_signals(lambda number: stop.set()):
        if not await _started(folder, stop, say):
            return
        settings = read_settings(folder)
        pieces_of = pieces_by_model(settings, tokenizer, say)
        for env in settings:
            pieces_of(env)  # load the tokenizers now, not during a request
        runner = web.AppRunner(follow_app(folder, ShownTokens(pieces_of, tokens)), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror}: choose another port") from error
        say(f"http://127.0.0.1:{runner.addresses[0][1]} follows {folder}; Ctrl-C ends it")
        await stop.wait()
        await runner.cleanup()


async def _started(folder: Path, stop: asyncio.Event, say: Callable[[str], None]) -> bool:
    """Wait until there is a run in `folder`. Return False if `stop` is set before."""
    if not (folder / FILE_NAME).is_file():
        say(f"{folder} holds no run yet: waiting for one (--out of toolroll run)")
    while not (folder / FILE_NAME).is_file() and not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
    return not stop.is_set()


def follow_app(folder: Path, tokens: ShownTokens) -> web.Application:
    """Return the app with the run's page. Other web pages read neither it nor its episodes."""

    @web.middleware
    async def checked(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            check_sender(request)
        except ApiError as error:
            raise web.HTTPForbidden(text=str(error)) from error
        response: web.StreamResponse = await handler(request)
        return response

    async def page(request: web.Request) -> web.Response:
        body = followed_page(page_title(folder))
        return web.Response(body=body, content_type="text/html", charset="utf-8")

    async def more(request: web.Request) -> web.Response:
        try:
            read = ReadSoFar(*(int(request.query.get(name, 0)) for name in ReadSoFar._fields))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        answer = episodes_after(folder / FILE_NAME, read, tokens)
        answer |= {"settings": [read_settings(folder)], "summary": read_summary(folder)}
        return web.Response(body=json_bytes(answer), content_type="application/json")

    app = web.Application(middlewares=[checked])
    app.add_routes([web.get("/", page), web.get("/more", more)])
    return app
