"""User simulators. The user is a list of lines, or a model behind an OpenAI-compatible endpoint."""

from typing import Any

from toolroll.agents.users.openai_user import CallTool, OpenAIUser, OpenAIUsers, UserConfig
from toolroll.agents.users.scripted import (
    STOP_MARKER,
    ScriptedUser,
    checked_line,
    is_stop,
    visible_text,
)


def openai_users(**settings: Any) -> OpenAIUsers:
    """Return the users of `toolroll run --user-model`. `settings`: the fields of `UserConfig`."""
    return OpenAIUsers(UserConfig.checked("the user simulator", settings))


__all__ = [
    "STOP_MARKER",
    "CallTool",
    "OpenAIUser",
    "OpenAIUsers",
    "ScriptedUser",
    "UserConfig",
    "checked_line",
    "is_stop",
    "openai_users",
    "visible_text",
]
