"""Who plays the user: a list of lines, or a model behind an OpenAI-compatible endpoint."""

from typing import Any

from pydantic import ValidationError

from toolroll.agents.users.chat import ChatClient, UserConfig
from toolroll.agents.users.openai_user import OpenAIUser, OpenAIUsers
from toolroll.agents.users.scripted import ScriptedUser
from toolroll.agents.users.stop import STOP_MARKER, is_stop, visible_text
from toolroll.rollout.errors import UsageError


def openai_users(**settings: Any) -> OpenAIUsers:
    """The user simulators of `toolroll run --user-model`: `settings` are `UserConfig`'s fields."""
    try:
        return OpenAIUsers(UserConfig(**settings))
    except ValidationError as error:
        raise UsageError(f"the user simulator's settings: {error}") from error


__all__ = [
    "STOP_MARKER",
    "ChatClient",
    "OpenAIUser",
    "OpenAIUsers",
    "ScriptedUser",
    "UserConfig",
    "is_stop",
    "openai_users",
    "visible_text",
]
