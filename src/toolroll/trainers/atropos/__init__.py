"""Atropos: `BaseEnv` and `ServerManager` with a `managed_server` that records the sampled token ids
exactly.

An environment changes only one line: `from atroposlib.envs.base import BaseEnv, ...` becomes `from
toolroll.trainers.atropos import BaseEnv, ...`. This package exports every name of
`atroposlib.envs.base`, and imports atroposlib when one of these names is first used.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.trainers.atropos.managed import ManagedServers

__all__ = ["ManagedServers"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    make = {"BaseEnv": _base_env, "ServerManager": _server_manager}.get(name)
    return make() if make is not None else getattr(_theirs(), name)


def _theirs() -> Any:
    try:
        return importlib.import_module("atroposlib.envs.base")
    except ImportError as error:
        raise UsageError(
            f"atroposlib cannot be imported ({error}): pip install atroposlib"
        ) from error


@cache
def _server_manager() -> type[Any]:
    class ServerManager(_theirs().ServerManager):  # type: ignore[misc]
        """Atropos' `ServerManager`, with a `managed_server` that records the sampled token ids."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.managed_server = ManagedServers(self).managed_server

    return ServerManager


@cache
def _base_env() -> type[Any]:
    class BaseEnv(_theirs().BaseEnv):  # type: ignore[misc]
        """Atropos' `BaseEnv`. Its `self.server.managed_server` records the sampled token ids."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server.managed_server = ManagedServers(self.server).managed_server

    return BaseEnv
