"""The endpoint. It makes any agent trainable, without changes to the agent, if the agent uses
OpenAI's chat completions API, OpenAI's Responses API or Anthropic's Messages API.

Each public name is loaded from its module when it is first used, so that `toolroll --help` can read
the settings without loading the HTTP server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolroll.endpoint.endpoint import Endpoint
    from toolroll.endpoint.endpoint_settings import EndpointSettings
    from toolroll.endpoint.http.app import EndpointServer

_HOMES = {
    "Endpoint": "endpoint",
    "EndpointServer": "http.app",
    "EndpointSettings": "endpoint_settings",
}

__all__ = ["Endpoint", "EndpointServer", "EndpointSettings"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
