"""The endpoint without a network: `ToolrollClient`, an `AsyncOpenAI` that runs in process, and
`ManagedSession`, the calls and the state of one rollout. `ManagedServer`, `DummyManagedServer`,
`ManagedServerAdapter` and `AtroposManagedClient` (with the types of its replies) replace Atropos'
classes of the same names.

This package needs `openai` (2.8 or newer): pip install "openai>=2.8". Apart from this package, only
the OpenRLHF adapter imports `openai`.
"""

from toolroll.endpoint.in_process.client import ToolrollClient
from toolroll.endpoint.in_process.managed import ManagedSession, managed_session
from toolroll.endpoint.in_process.managed_server import ManagedServer
from toolroll.endpoint.in_process.published import (
    AtroposManagedClient,
    ChoiceLogprobs,
    DummyManagedServer,
    EnhancedChatCompletion,
    EnhancedChoice,
    LogprobContent,
    ManagedServerAdapter,
    SequenceNode,
)

__all__ = [
    "AtroposManagedClient",
    "ChoiceLogprobs",
    "DummyManagedServer",
    "EnhancedChatCompletion",
    "EnhancedChoice",
    "LogprobContent",
    "ManagedServer",
    "ManagedServerAdapter",
    "ManagedSession",
    "SequenceNode",
    "ToolrollClient",
    "managed_session",
]
