"""`toolroll serve`: the endpoint in front of an engine, until it is interrupted."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.config import RolloutArgs
from toolroll.rollout.model.model import Model
from toolroll.rollout.server.app import EndpointServer
from toolroll.rollout.server.config import EndpointSettings
from toolroll.rollout.server.endpoint import Endpoint

logger = logging.getLogger(__name__)


async def serve(
    args: RolloutArgs, settings: EndpointSettings, ready: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called with the address."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Model.from_args(args) as served:
        health = await served.engine.health()
        if not health.ok:
            # its capabilities and its context length are asked for once, now
            raise UsageError(health.why)
        for line in await served.check_identity(allow_mismatch=args.allow_model_mismatch):
            logger.warning("%s", line)
        try:
            async with EndpointServer(Endpoint(served, settings)) as server:
                ready(server.url)
                await stop.wait()
        except OSError as error:
            raise UsageError(
                f"the endpoint cannot listen on {settings.host}:{settings.port}: {error}"
            ) from error
