"""`toolroll serve`: runs the endpoint in front of an engine until it is interrupted."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from toolroll.endpoint.endpoint import Endpoint
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.http.app import EndpointServer
from toolroll.endpoint.sessions.session_store import SessionStore, store_settings
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.provenance import provenance
from toolroll.rollout.runtime.event_loop import stop_signals
from toolroll.rollout.settings import RolloutArgs

logger = logging.getLogger(__name__)


async def serve(
    args: RolloutArgs,
    settings: EndpointSettings,
    ready: Callable[[str], None],
    out: Path | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is called with the server's address. `out`: the folder
    in which sessions are kept. After SIGINT, all sessions in it are finished: they are written as
    episodes. After SIGTERM, the next server with the same folder continues them.
    """
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with stop_signals(partial(_stop, stop)):
        await _serve_until(stop, args, settings, ready, out)


async def _serve_until(
    stop: asyncio.Future[int],
    args: RolloutArgs,
    settings: EndpointSettings,
    ready: Callable[[str], object],
    out: Path | None,
) -> None:
    async with Model.from_args(args) as model:
        # wait now: the start asks the engine for its context length
        waiting = asyncio.create_task(model.engine.wait_until_healthy())
        tasks: list[asyncio.Future[Any]] = [waiting, stop]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            return
        health = waiting.result()
        if not health.ok:
            raise UsageError(f"the engine at {model.url}: {health.why}")
        for line in await model.check_identity(allow_mismatch=args.allow_model_mismatch):
            logger.warning("%s", line)
        store = None
        if out is not None:
            facts = await model.run_in_thread(store_settings, model, args.model)
            store = SessionStore(out, facts, provenance=await provenance(model))
        try:
            async with EndpointServer(Endpoint(model, settings, store)) as server:
                ready(server.url)
                number = await stop
                if store is not None:
                    store.finish_at_end = number == signal.SIGINT
        except OSError as error:
            raise UsageError(
                f"the endpoint cannot listen on {settings.host}:{settings.port}: {error}; "
                "choose another --port"
            ) from error


def _stop(stop: asyncio.Future[int], number: int) -> None:
    if not stop.done():
        stop.set_result(number)
