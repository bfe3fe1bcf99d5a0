"""Token-exact multi-turn tool rollouts for SGLang.

The names below are the public ones; each is loaded from its module at first use, so that `import toolroll` costs milliseconds.
`toolroll.agents` and `toolroll.parsers` give the published names in the same way (docs/adr/0005-published-names.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from toolroll.agents.loop.call_policy import CallPolicy
    from toolroll.agents.tool_calling import TrainableToolCallingAgent, agent_factory
    from toolroll.agents.trainable import TrainableAgentMixin
    from toolroll.parsers.registry import get_parser
    from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
    from toolroll.rollout.engine import Engine, EngineConfig
    from toolroll.rollout.errors import ActionError, ToolrollError, UsageError
    from toolroll.rollout.model.config import RolloutArgs
    from toolroll.rollout.model.model import ServedModel
    from toolroll.rollout.runs.episode_file import read_episodes
    from toolroll.rollout.runs.registry import load_environment
    from toolroll.rollout.runs.runner import Runner, RunSettings
    from toolroll.rollout.session.session import Session
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
    "toolroll.agents.loop.call_policy": ("CallPolicy",),
    "toolroll.agents.tool_calling": ("TrainableToolCallingAgent", "agent_factory"),
    "toolroll.agents.trainable": ("TrainableAgentMixin",),
    "toolroll.parsers.registry": ("get_parser",),
    "toolroll.parsers.types": ("CallStatus", "ParsedReply", "ToolCall"),
    "toolroll.rollout.model.config": ("RolloutArgs",),
    "toolroll.rollout.engine": ("Engine", "EngineConfig"),
    "toolroll.rollout.errors": ("ActionError", "ToolrollError", "UsageError"),
    "toolroll.rollout.runs.registry": ("load_environment",),
    "toolroll.rollout.runs.runner": ("RunSettings", "Runner"),
    "toolroll.rollout.model.model": ("ServedModel",),
    "toolroll.rollout.session.session": ("Session",),
    "toolroll.rollout.runs.episode_file": ("read_episodes",),
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

_PUBLISHED = {
    "toolroll.agents": {
        "RESPOND_ACTION_FIELD_NAME": "toolroll.agents.environments.tau_actions",
        "RESPOND_ACTION_NAME": "toolroll.agents.environments.tau_actions",
        "TOOL_INSTRUCTION": "toolroll.agents.trainable",
        "InteractionResult": "toolroll.rollout.types",
        "Status": "toolroll.rollout.types",
        "TauAction": "toolroll.agents.environments.tau_actions",
        "TrainableAgentMixin": "toolroll.agents.trainable",
        "TrainableToolCallingAgent": "toolroll.agents.tool_calling",
        "agent_factory": "toolroll.agents.tool_calling",
        "call_to_action_sglang": "toolroll.agents.environments.tau_actions",
    },
    "toolroll.parsers": {
        "OpenAICompatibleToolCallAdapter": "toolroll.parsers.openai",
        "create_openai_adapter": "toolroll.parsers.openai",
        "get_parser": "toolroll.parsers.registry",
        "parse_tools": "toolroll.parsers.openai",
        "parser_names": "toolroll.parsers.registry",
    },
}

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


def _lazy(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that loads `name` from `homes[name]`."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load


def _give_folders_their_names() -> None:
    # The folders have no `__init__.py`, in which this would otherwise stand.
    for folder, homes in _PUBLISHED.items():
        vars(import_module(folder)).update(__all__=sorted(homes), __getattr__=_lazy(folder, homes))


_give_folders_their_names()
__getattr__ = _lazy("toolroll", _HOME_OF)


def __dir__() -> list[str]:
    return sorted(__all__)
