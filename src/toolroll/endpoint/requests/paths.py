"""The paths of requests: the API that a path names, and hints for paths that do not exist.

Invariant: a session name in a path never affects the result. Paths are percent-encoded here, so a
session name contains no `/`.
"""

from __future__ import annotations

import re

_APIS = frozenset({"chat", "completions", "messages", "models", "responses"})
_SESSION = re.compile(r"(?:/v1)?/sessions?/([^/]*)")
_ROUTE = re.compile(
    r"/(chat/completions|completions|messages(?:/count_tokens)?|models|responses)(?=/|$)"
)


def api_of(path: str) -> str | None:
    """Return the first API name in `path`, such as "chat" or "messages", or None."""
    _, rest = _split_session(path)
    return next((name for name in rest.split("/") if name in _APIS), None)


def instead_of(path: str) -> str:
    """Return the error message for the unknown `path`. It says what to use instead."""
    hint = hint_for(path)
    if hint is not None:
        return f"there is no {path!r}: {hint}"
    routes = "; ".join(f"{method} {names}" for method, names in _SERVED.items())
    return (
        f"there is no {path!r}. The routes are {routes}; /v1/... and /tokenize also work under "
        "/sessions/NAME"
    )


def hint_for(path: str) -> str | None:
    """Return what to use instead of `path`. Return None if this is not known, or if `path` has the
    form of a route.
    """
    session, rest = _split_session(path)
    hint = next((hint for name, hint in _INSTEAD.items() if f"{name}/" in f"{rest}/"), None)
    route = _ROUTE.search(rest)
    if hint is not None or route is None:
        return hint
    name, base, after = route[1], f"{session}/v1", rest[route.end() :]
    expected = f"{base}/{name}"
    if path == expected or (path.startswith(f"{expected}/") and after not in ("/", route[0])):
        return None  # the second: something below a route, such as a model's name
    if name.startswith("messages"):
        return (
            f"use {base}/{name}. The base_url of Anthropic's SDK, which adds /v1/messages, must "
            f"end with {session or 'the port'}; for a client that adds only /messages, with {base}"
        )
    return f"the client's base_url must end with {base}, to which the client adds /{name}"


_SERVED = {
    "POST": "/v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, "
    "/v1/completions, /tokenize, /v1/tokenize, /sessions",
    "GET": "/v1/models, /v1/models/MODEL, /sessions, /health, /metrics",
}
_CHAT_INSTEAD = "use /v1/chat/completions (chat.completions.create in OpenAI's SDK)"
_INSTEAD = {
    "/assistants": _CHAT_INSTEAD,
    "/threads": _CHAT_INSTEAD,
    "/embeddings": "this endpoint only generates text",
    "/responses/compact": "compaction is not served, so the client must shorten the conversation "
    "itself",
    "/responses/input_tokens": "the tokens of a response are not counted; /tokenize counts those "
    "of messages",
    "/generate": "only the engine has SGLang's own routes: use /v1/completions, which takes token "
    "ids as prompt",
    "/detokenize": "only the engine has SGLang's own routes; here, each reply has its token ids "
    "and its text",
}
"""Hints for well-known routes that are not served."""


def _split_session(path: str) -> tuple[str, str]:
    """Return the prefix of the routes of the session that `path` names, or "" if it names none, and
    the rest of `path`.
    """
    match = _SESSION.match(path)
    return ("", path) if match is None else (f"/sessions/{match[1]}", path[match.end() :])
