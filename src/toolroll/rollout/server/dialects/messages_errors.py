"""Anthropic's error bodies."""

from __future__ import annotations

from typing import Any

from toolroll.rollout.server.dialects.blocks import renamed
from toolroll.rollout.server.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES = {
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
}
"""Maps the core's field names to Anthropic's, if they differ."""


def error_body(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error body, with the endpoint's stable `code`, and with `param` if a field
    is at fault.
    """
    error = renamed(error, _NAMES)
    other = "invalid_request_error" if error.status < 500 else "api_error"
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(error.status, other),
            "message": str(error),
            "code": error.code,
            "param": error.param,
        },
    }
