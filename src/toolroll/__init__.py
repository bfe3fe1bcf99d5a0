"""Token-exact multi-turn tool rollouts for SGLang.

The public names are listed below. Each is loaded from its module when it is first used, so that
`import toolroll` costs only milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # each name is repeated, so that type checkers export it
    from toolroll.agents.environments.tool_environment import PlayedCall as PlayedCall
    from toolroll.agents.environments.tool_environment import tool_environment as tool_environment
    from toolroll.agents.loop.call_policy import CallPolicy as CallPolicy
    from toolroll.agents.tool_calling import TrainableToolCallingAgent as TrainableToolCallingAgent
    from toolroll.agents.tool_calling import agent_factory as agent_factory
    from toolroll.agents.trainable import TrainableAgentMixin as TrainableAgentMixin
    from toolroll.parsers.registry import get_parser as get_parser
    from toolroll.parsers.types import CallStatus as CallStatus
    from toolroll.parsers.types import ParsedReply as ParsedReply
    from toolroll.parsers.types import ToolCall as ToolCall
    from toolroll.rollout.engine import Engine as Engine
    from toolroll.rollout.engine import EngineConfig as EngineConfig
    from toolroll.rollout.errors import ActionError as ActionError
    from toolroll.rollout.errors import ToolrollError as ToolrollError
    from toolroll.rollout.errors import UsageError as UsageError
    from toolroll.rollout.model.model import Model as Model
    from toolroll.rollout.runs.episode_file import read_episodes as read_episodes
    from toolroll.rollout.runs.registry import load_environment as load_environment
    from toolroll.rollout.runs.runner import Runner as Runner
    from toolroll.rollout.session.session import Session as Session
    from toolroll.rollout.settings import RolloutArgs as RolloutArgs
    from toolroll.rollout.settings import RunSettings as RunSettings
    from toolroll.rollout.template import ChatTemplate as ChatTemplate
    from toolroll.rollout.types import Action as Action
    from toolroll.rollout.types import Completion as Completion
    from toolroll.rollout.types import Environment as Environment
    from toolroll.rollout.types import EnvironmentFactory as EnvironmentFactory
    from toolroll.rollout.types import EnvironmentOptions as EnvironmentOptions
    from toolroll.rollout.types import Episode as Episode
    from toolroll.rollout.types import InteractionResult as InteractionResult
    from toolroll.rollout.types import Observation as Observation
    from toolroll.rollout.types import Status as Status
    from toolroll.rollout.types import StepResult as StepResult
    from toolroll.rollout.types import StopReason as StopReason
    from toolroll.rollout.types import Task as Task
    from toolroll.rollout.types import Trajectory as Trajectory
    from toolroll.rollout.types import Turn as Turn

_HOMES = {
    "agents.environments.tool_environment": "PlayedCall tool_environment",
    "agents.loop.call_policy": "CallPolicy",
    "agents.tool_calling": "TrainableToolCallingAgent agent_factory",
    "agents.trainable": "TrainableAgentMixin",
    "parsers.registry": "get_parser",
    "parsers.types": "CallStatus ParsedReply ToolCall",
    "rollout.settings": "RolloutArgs RunSettings",
    "rollout.engine": "Engine EngineConfig",
    "rollout.errors": "ActionError ToolrollError UsageError",
    "rollout.runs.registry": "load_environment",
    "rollout.runs.runner": "Runner",
    "rollout.model.model": "Model",
    "rollout.session.session": "Session",
    "rollout.runs.episode_file": "read_episodes",
    "rollout.template": "ChatTemplate",
    "rollout.types": "Action Completion Environment EnvironmentFactory EnvironmentOptions Episode "
    "InteractionResult Observation Status StepResult StopReason Task Trajectory Turn",
}
_HOME_OF = {name: f"toolroll.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
