"""`ManagedServers`: a `managed_server` for Atropos' `ServerManager` that records the sampled token
ids exactly.

Invariants: as in Atropos, a session uses the healthy server with the most free slots. Sessions with
the same server and tokenizer share connections, which are closed when the last of these sessions
ends.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from toolroll.endpoint.in_process.managed import open_model
from toolroll.endpoint.in_process.managed_server import ManagedServer
from toolroll.endpoint.in_process.published import DummyManagedServer
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model

_ALLOW_DUMMY = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


class ManagedServers:
    """Opens managed sessions on the servers of `manager`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._open: dict[tuple[int, int], tuple[Model, int]] = {}

    @asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Any = None,
        base_url: str | None = None,
        preserve_think_blocks: bool | None = None,  # noqa: FBT001 - as published
    ) -> AsyncIterator[ManagedServer | DummyManagedServer]:
        """Yield a `ManagedServer` for the server at `base_url`. By default, use the healthy server
        with the most free slots.

        Atropos' `OpenAIServer` returns no token ids. For such a server, yield a
        `DummyManagedServer` if the environment variable ATROPOS_ALLOW_DUMMY_MANAGED_SERVER is set.
        Otherwise raise `NotImplementedError`.
        """
        server = self._chosen(base_url)
        if any(kind.__name__ == "OpenAIServer" for kind in type(server).__mro__):
            yield _dummy(server, tokenizer)
            return
        key = (id(server), id(tokenizer))
        model, users = self._open.get(key, (None, 0))
        if model is None:
            model = open_model(server, tokenizer, self._manager.tool_parser)
        self._open[key] = model, users + 1
        try:
            async with ManagedServer(
                server,
                tool_parser=self._manager.tool_parser,
                preserve_think_blocks=preserve_think_blocks,
                model=model,
            ) as managed:
                yield managed
        finally:
            model, users = self._open.pop(key)
            if users > 1:
                self._open[key] = model, users - 1
            else:
                await model.aclose()

    def _chosen(self, base_url: str | None) -> Any:
        if self._manager.use_proxy:
            raise UsageError(
                "Atropos' proxy returns tokens that were encoded again, which are not exact: unset "
                "proxy_url and ATROPOS_PROXY_URL"
            )
        servers = self._manager.servers
        if base_url is not None:
            for server in servers:
                if server.config.base_url == base_url:
                    return server
            raise UsageError(f"no server of this manager is at {base_url!r}")
        healthy = [server for server in servers if server.server_healthy]
        return max(healthy, key=lambda server: server.sem._value, default=servers[0])


def _dummy(server: Any, tokenizer: Any) -> DummyManagedServer:
    if os.environ.get(_ALLOW_DUMMY, "").lower() not in ("1", "true", "yes"):
        raise NotImplementedError(
            "a server of OpenAI's type has no token ids, so its answers cannot be trained on. Use "
            f"server_type='sglang', or set {_ALLOW_DUMMY}=1 to evaluate with it"
        )
    return DummyManagedServer(server, tokenizer)
