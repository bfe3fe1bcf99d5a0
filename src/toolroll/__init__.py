"""Token-exact multi-turn tool rollouts for SGLang."""

from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
from toolroll.rollout.errors import ToolrollError, UsageError
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

__version__ = "0.1.0"

__all__ = [
    "Action",
    "CallStatus",
    "Completion",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentOptions",
    "Episode",
    "InteractionResult",
    "Observation",
    "ParsedReply",
    "Status",
    "StepResult",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolrollError",
    "Trajectory",
    "Turn",
    "UsageError",
]
