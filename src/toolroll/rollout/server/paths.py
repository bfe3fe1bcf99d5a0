"""The paths of requests: the API that a path names, and hints for paths that do not exist.

Invariant: a session name in a path never affects the result. Paths are percent-encoded here, so a
session name contains no `/`.
"""

from __future__ import annotations

import re

_APIS = frozenset({"chat", "completions", "messages", "models", "responses"})
_SESSION = re.compile(r"/sessions/[^/]*")


def api_of(path: str) -> str | None:
    """Return the first API name in `path`, such as "chat" or "messages". Return None if there is
    none.
    """
    _, rest = _split_session(path)
    return next((name for name in rest.split("/") if name in _APIS), None)


def instead_of(path: str) -> str:
    """Return the error message for `path`, which does not exist. The message says what to use
    instead.
    """
    session, rest = _split_session(path)
    for name in ("/chat/completions", "/completions", "/responses", "/models"):
        base, found, _ = rest.partition(name)
        if found and not base.endswith("/v1"):
            base = f"{session}{base}/v1"
            return f"there is no {path!r}: the client's base_url must end with /v1, as in {base}"
    base, found, _ = rest.partition("/v1/v1/messages")
    if found:
        base = f"{session}{base}" or "/"
        return f"there is no {path!r}: the client adds /v1 itself, so set base_url to {base!r}"
    hint = next((hint for name, hint in _INSTEAD.items() if f"{name}/" in f"{rest}/"), None)
    routes = "; ".join(f"{method} {names}" for method, names in _SERVED.items())
    words = f"there is no {path!r}" + (f": {hint}" if hint else "")
    return f"{words}. The routes are {routes}; /v1/... and /tokenize also work under /sessions/NAME"


_SERVED = {
    "POST": "/v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, "
    "/v1/completions, /tokenize, /v1/tokenize, /sessions",
    "GET": "/v1/models, /v1/models/MODEL, /sessions, /health, /metrics, /docs",
}
_CHAT_INSTEAD = "use /v1/chat/completions (chat.completions.create in OpenAI's SDK)"
_INSTEAD = {
    "/assistants": _CHAT_INSTEAD,
    "/threads": _CHAT_INSTEAD,
    "/embeddings": "this endpoint only generates text",
    "/generate": "only the engine has SGLang's own routes: use /v1/completions, which takes token "
    "ids as prompt",
    "/detokenize": "only the engine has SGLang's own routes; here, each reply has its token ids "
    "and its text",
}
"""Hints for well-known routes that are not served."""


def _split_session(path: str) -> tuple[str, str]:
    """Split `path` into the part that names a session, which may be empty, and the rest."""
    found = _SESSION.match(path)
    end = found.end() if found is not None else 0
    return path[:end], path[end:]
