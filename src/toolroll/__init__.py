"""Token-exact multi-turn tool rollouts for SGLang.

The public names are listed below. Each is loaded from its module when it is first used, so that
`import toolroll` costs only milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from toolroll.agents.environments.tool_environment import PlayedCall, tool_environment
    from toolroll.agents.loop.call_policy import CallPolicy
    from toolroll.agents.tool_calling import TrainableToolCallingAgent, agent_factory
    from toolroll.agents.trainable import TrainableAgentMixin
    from toolroll.parsers.registry import get_parser
    from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
    from toolroll.rollout.engine import Engine, EngineConfig
    from toolroll.rollout.environment import (
        Action,
        Environment,
        EnvironmentFactory,
        EnvironmentOptions,
        Observation,
        StepResult,
        Task,
    )
    from toolroll.rollout.episode import Episode, InteractionResult
    from toolroll.rollout.errors import ActionError, ToolrollError, UsageError
    from toolroll.rollout.model.model import Model
    from toolroll.rollout.model.tokenizers import load_tokenizer
    from toolroll.rollout.runs.callbacks import Callback
    from toolroll.rollout.runs.episode_file import read_episodes
    from toolroll.rollout.runs.registry import load_environment
    from toolroll.rollout.runs.runner import Runner
    from toolroll.rollout.runs.summary import Summary
    from toolroll.rollout.session.session import Session
    from toolroll.rollout.settings import RolloutArgs, RunSettings
    from toolroll.rollout.template import ChatTemplate, Cursor, tokenize_conversation
    from toolroll.rollout.types import (
        Completion,
        GenerateRequest,
        Message,
        Status,
        StopReason,
        Trajectory,
        Turn,
    )

_HOMES = {
    "toolroll.agents.environments.tool_environment": ("PlayedCall", "tool_environment"),
    "toolroll.agents.loop.call_policy": ("CallPolicy",),
    "toolroll.agents.tool_calling": ("TrainableToolCallingAgent", "agent_factory"),
    "toolroll.agents.trainable": ("TrainableAgentMixin",),
    "toolroll.parsers.registry": ("get_parser",),
    "toolroll.parsers.types": ("CallStatus", "ParsedReply", "ToolCall"),
    "toolroll.rollout.settings": ("RolloutArgs", "RunSettings"),
    "toolroll.rollout.environment": (
        "Action",
        "Environment",
        "EnvironmentFactory",
        "EnvironmentOptions",
        "Observation",
        "StepResult",
        "Task",
    ),
    "toolroll.rollout.episode": ("Episode", "InteractionResult"),
    "toolroll.rollout.engine": ("Engine", "EngineConfig"),
    "toolroll.rollout.errors": ("ActionError", "ToolrollError", "UsageError"),
    "toolroll.rollout.runs.registry": ("load_environment",),
    "toolroll.rollout.runs.runner": ("Runner",),
    "toolroll.rollout.model.model": ("Model",),
    "toolroll.rollout.model.tokenizers": ("load_tokenizer",),
    "toolroll.rollout.runs.callbacks": ("Callback",),
    "toolroll.rollout.runs.summary": ("Summary",),
    "toolroll.rollout.session.session": ("Session",),
    "toolroll.rollout.runs.episode_file": ("read_episodes",),
    "toolroll.rollout.template": ("ChatTemplate", "Cursor", "tokenize_conversation"),
    "toolroll.rollout.types": (
        "Completion",
        "GenerateRequest",
        "Message",
        "Status",
        "StopReason",
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
    "Callback",
    "ChatTemplate",
    "Completion",
    "Cursor",
    "Engine",
    "EngineConfig",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentOptions",
    "Episode",
    "GenerateRequest",
    "InteractionResult",
    "Message",
    "Model",
    "Observation",
    "ParsedReply",
    "PlayedCall",
    "RolloutArgs",
    "RunSettings",
    "Runner",
    "Session",
    "Status",
    "StepResult",
    "StopReason",
    "Summary",
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
    "load_tokenizer",
    "read_episodes",
    "tokenize_conversation",
    "tool_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
