"""Who plays the user: a list of lines, or a model behind an OpenAI-compatible endpoint."""

from toolroll.agents.users.chat import ChatClient, UserConfig
from toolroll.agents.users.openai_user import OpenAIUser, OpenAIUsers
from toolroll.agents.users.scripted import ScriptedUser
from toolroll.agents.users.stop import STOP_MARKER, is_stop, visible_text

__all__ = [
    "STOP_MARKER",
    "ChatClient",
    "OpenAIUser",
    "OpenAIUsers",
    "ScriptedUser",
    "UserConfig",
    "is_stop",
    "visible_text",
]
