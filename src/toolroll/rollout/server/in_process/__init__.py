"""The endpoint without a network: an `AsyncOpenAI` that runs in process, and sessions that keep
their own state.

This package needs `openai` (2.8 or newer): pip install "openai>=2.8". No other part of the library
imports `openai`.
"""

from toolroll.rollout.server.in_process.client import ToolrollClient
from toolroll.rollout.server.in_process.dummy import DummyManagedServer
from toolroll.rollout.server.in_process.managed import ManagedSession, managed_session
from toolroll.rollout.server.in_process.managed_server import ManagedServer
from toolroll.rollout.server.in_process.nodes import SequenceNode

__all__ = [
    "DummyManagedServer",
    "ManagedServer",
    "ManagedSession",
    "SequenceNode",
    "ToolrollClient",
    "managed_session",
]
