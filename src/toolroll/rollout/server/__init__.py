"""The endpoint. It makes any agent trainable, without changes to the agent, if the agent uses
OpenAI's chat completions API, OpenAI's Responses API or Anthropic's Messages API.
"""

from toolroll.rollout.server.access import session_key
from toolroll.rollout.server.app import SESSION_HEADER, EndpointServer
from toolroll.rollout.server.config import EndpointSettings
from toolroll.rollout.server.endpoint import Endpoint
from toolroll.rollout.server.errors import ApiError

__all__ = [
    "SESSION_HEADER",
    "ApiError",
    "Endpoint",
    "EndpointServer",
    "EndpointSettings",
    "session_key",
]
