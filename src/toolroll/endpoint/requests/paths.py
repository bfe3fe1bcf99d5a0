"""The paths of requests: the API that a path names, and the error for a path that does not exist.

Invariant: a session name in a path never affects the result. Paths are percent-encoded here, so a
session name contains no `/`.
"""

from __future__ import annotations

import re

_APIS = frozenset({"chat", "completions", "messages", "models", "responses"})
_SESSION = re.compile(r"(?:/v1)?/sessions?/([^/]*)")
_ROUTES = (
    "POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, "
    "/v1/completions, /tokenize, /v1/tokenize, /sessions; GET /v1/models, /v1/models/MODEL, "
    "/sessions, /health, /metrics"
)


def api_of(path: str) -> str | None:
    """Return the first API name in `path`, such as "chat" or "messages", or None."""
    match = _SESSION.match(path)
    api_path = path if match is None else path[match.end() :]
    return next((name for name in api_path.split("/") if name in _APIS), None)


def unknown(path: str) -> str:
    """Return the error message for a `path` that does not exist."""
    match = _SESSION.match(path)
    session = "" if match is None else f"/sessions/{match[1]}"
    return (
        f"there is no {path!r}. A client's base_url must end with {session}/v1, with Anthropic's "
        f"SDK with {session or 'the port'}. The routes are {_ROUTES}; /v1/... and /tokenize also "
        "work under /sessions/NAME"
    )
