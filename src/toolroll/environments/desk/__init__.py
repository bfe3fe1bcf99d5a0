"""`desk`: a small environment without a server. It is the service desk of a lending library."""

from toolroll.environments.desk.environment import (
    DESK,
    Desk,
    DeskFactory,
    DeskUser,
    is_told,
    judge,
    reference,
)
from toolroll.environments.desk.policy import BRIEF_POLICY, POLICY, TODAY, TOPICS
from toolroll.environments.desk.tools import (
    TOOLS,
    ToolError,
    call_tool,
    final_state,
    open_database,
)

__all__ = [
    "BRIEF_POLICY",
    "DESK",
    "POLICY",
    "TODAY",
    "TOOLS",
    "TOPICS",
    "Desk",
    "DeskFactory",
    "DeskUser",
    "ToolError",
    "call_tool",
    "final_state",
    "is_told",
    "judge",
    "open_database",
    "reference",
]
