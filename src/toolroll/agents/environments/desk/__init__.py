"""`desk`: a small environment without a server. It is the service desk of a lending library."""

from toolroll.agents.environments.desk.database import final_state, open_database
from toolroll.agents.environments.desk.environment import Desk
from toolroll.agents.environments.desk.factory import DESK, DeskFactory
from toolroll.agents.environments.desk.judge import is_told, judge, reference
from toolroll.agents.environments.desk.member import DeskUser
from toolroll.agents.environments.desk.policy import BRIEF_POLICY, POLICY, TODAY, TOPICS
from toolroll.agents.environments.desk.tools import TOOLS, ToolError, call_tool

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
