"""The names of `trainable_agents`, which is the module of slime's tau-bench example, in one place.

`toolroll.agents` itself has no `__init__.py`. If it had one, the folder `agents` at the top of the
repository would hide the package `agents` of openai-agents from code that runs there.
"""

from toolroll.agents.loop.adapt import (
    RESPOND_ACTION_FIELD_NAME,
    RESPOND_ACTION_NAME,
    TauAction,
    call_to_action_sglang,
)
from toolroll.agents.tool_calling import TrainableToolCallingAgent, agent_factory
from toolroll.agents.trainable import TOOL_INSTRUCTION, TrainableAgentMixin
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.types import Status

__all__ = [
    "RESPOND_ACTION_FIELD_NAME",
    "RESPOND_ACTION_NAME",
    "TOOL_INSTRUCTION",
    "InteractionResult",
    "Status",
    "TauAction",
    "TrainableAgentMixin",
    "TrainableToolCallingAgent",
    "agent_factory",
    "call_to_action_sglang",
]
