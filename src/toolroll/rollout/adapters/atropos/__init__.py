"""Atropos: versions of `BaseEnv` and `ServerManager` whose managed sessions have exact tokens.

An environment changes only one line: `from atroposlib.envs.base import BaseEnv, ...` becomes `from
toolroll.rollout.adapters.atropos import BaseEnv, ...`. This package exports every name of
`atroposlib.envs.base`.
"""

from __future__ import annotations

from typing import Any

from toolroll.rollout.adapters.atropos import base
from toolroll.rollout.adapters.atropos.managed import ManagedServers

__all__ = ["ManagedServers"]


def __getattr__(name: str) -> Any:
    return getattr(base, name)
