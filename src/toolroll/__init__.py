"""Token-exact multi-turn tool rollouts for SGLang.

The names below are the public ones; each is loaded from its module at first use, so that `import toolroll` costs milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from toolroll.agents.policy import CallPolicy
    from toolroll.agents.tool_calling import TrainableToolCallingAgent, agent_factory
    from toolroll.agents.trainable import TrainableAgentMixin
    from toolroll.parsers.registry import get_parser
    from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
    from toolroll.rollout.args import RolloutArgs
    from toolroll.rollout.engine import Engine, EngineConfig
    from toolroll.rollout.errors import ActionError, ToolrollError, UsageError
    from toolroll.rollout.registry import load_environment
    from toolroll.rollout.runner import Runner, RunSettings
    from toolroll.rollout.served import ServedModel
    from toolroll.rollout.session import Session
    from toolroll.rollout.store import read_episodes
    from toolroll.rollout.template import ChatTemplate
    from toolroll.rollout.types import (
        Action,
        Completion,
        Environment,
        EnvironmentFactory,
        EnvironmentOptions,
        Episode,
        InteractionResult,
        Observation,
        Status,
        StepResult,
        StopReason,
        Task,
        Trajectory,
        Turn,
    )

_HOMES = {
    "toolroll.agents.policy": ("CallPolicy",),
    "toolroll.agents.tool_calling": ("TrainableToolCallingAgent", "agent_factory"),
    "toolroll.agents.trainable": ("TrainableAgentMixin",),
    "toolroll.parsers.registry": ("get_parser",),
    "toolroll.parsers.types": ("CallStatus", "ParsedReply", "ToolCall"),
    "toolroll.rollout.args": ("RolloutArgs",),
    "toolroll.rollout.engine": ("Engine", "EngineConfig"),
    "toolroll.rollout.errors": ("ActionError", "ToolrollError", "UsageError"),
    "toolroll.rollout.registry": ("load_environment",),
    "toolroll.rollout.runner": ("RunSettings", "Runner"),
    "toolroll.rollout.served": ("ServedModel",),
    "toolroll.rollout.session": ("Session",),
    "toolroll.rollout.store": ("read_episodes",),
    "toolroll.rollout.template": ("ChatTemplate",),
    "toolroll.rollout.types": (
        "Action",
        "Completion",
        "Environment",
        "EnvironmentFactory",
        "EnvironmentOptions",
        "Episode",
        "InteractionResult",
        "Observation",
        "Status",
        "StepResult",
        "StopReason",
        "Task",
        "Trajectory",
        "Turn",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Action",
    "ActionError",
    "CallPolicy",
    "CallStatus",
    "ChatTemplate",
    "Completion",
    "Engine",
    "EngineConfig",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentOptions",
    "Episode",
    "InteractionResult",
    "Observation",
    "ParsedReply",
    "RolloutArgs",
    "RunSettings",
    "Runner",
    "ServedModel",
    "Session",
    "Status",
    "StepResult",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolrollError",
    "TrainableAgentMixin",
    "TrainableToolCallingAgent",
    "Trajectory",
    "Turn",
    "UsageError",
    "agent_factory",
    "get_parser",
    "load_environment",
    "read_episodes",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'toolroll' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
