"""The errors that toolroll raises. Messages state what is wrong, where, and what to do.

There are two families. A `UsageError` can be fixed by the caller. A `RolloutError` says that a part
of the rollout failed; it becomes the episode's status and stop reason (see
`toolroll.rollout.types.StopReason`).
"""

from __future__ import annotations

import traceback
from typing import Any

_TRACEBACK = 4000
"""An episode's `info` keeps this many characters from the end of a traceback."""
_TEXT = 2000
"""Errors and episodes keep this many characters from the start of a message."""
_SLACK = 200
"""A text is shortened only if it is longer than the limit by more than this number of characters.
So a shortened text, with the note at its end, is not shortened again if another message quotes it.
"""


def capped(text: str, limit: int = _TEXT) -> str:
    """Return the first `limit` characters of `text`, with a note that tells how many more there
    were.
    """
    if len(text) <= limit + _SLACK:
        return text
    return f"{text[:limit]}... ({len(text) - limit:,} more characters)"


class ToolrollError(Exception):
    """The base of every error of this library."""


class UsageError(ToolrollError):
    """A setting, a path or an argument is wrong. The message names it and the valid values."""


class RolloutError(ToolrollError):
    """A part of the rollout failed in a way that the model did not cause.

    The message is capped, because it may quote a server or an environment.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(capped(message))


class EngineError(RolloutError):
    """The engine, or the router in front of it, refused a request or failed.

    `status` is the HTTP status (None without a response), `body` is the response's text, and
    `attempts` is the number of attempts.
    """

    def __init__(
        self, message: str, *, status: int | None = None, body: str = "", attempts: int = 1
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = capped(body)
        self.attempts = attempts


class EngineUnreachableError(EngineError):
    """A server has not responded at all for `engine_timeout` seconds.

    This is not a failure of one episode, so agents do not catch this error, and it ends the run.
    """


class ContextOverflowError(EngineError):
    """The prompt leaves no room for an answer in the model's context. If the context length is
    known, such a prompt is not sent.
    """


class CompletionError(EngineError):
    """The engine's response contradicts itself (ids, logprobs and counts do not agree)."""


class TokenError(RolloutError):
    """The recorded tokens may differ from the tokens that were served or sampled, so they are not
    trained on.
    """


class TemplateError(RolloutError):
    """The chat template cannot do what was requested, or refuses the conversation. The message
    gives the reason.
    """


class HistoryRewrittenError(TokenError):
    """The chat template rewrites tokens that were already served, so no delta can be appended.

    `reason` names the part that is rewritten. The caller may catch this error and start a new
    sequence (a fork).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template rewrites history: {reason}")
        self.reason = reason


class EnvironmentFailure(RolloutError):
    """The environment itself failed. The model's action was not the cause."""


class UserSimulatorError(RolloutError):
    """The user simulator failed. For example, its server failed, or its answer was empty."""


class TimeLimitError(RolloutError):
    """An episode, or one step of its environment, exceeded its time limit."""


class ActionError(ToolrollError):
    """Raised by an environment for a mistake in the model's action. The model gets the message as
    the observation.
    """


def describe(error: BaseException) -> dict[str, Any]:
    """Return `error` as plain data for an episode's `info`. Long texts are shortened.

    Engine errors include the status, attempts and body. Errors that an environment's code raised
    include the traceback.
    """
    data: dict[str, Any] = {"type": type(error).__name__, "message": message_of(error)}
    if isinstance(error, EngineError):
        data |= {"status": error.status, "attempts": error.attempts, "body": capped(error.body)}
    if isinstance(error, EnvironmentFailure) and error.__cause__ is not None:
        data["traceback"] = "".join(traceback.format_exception(error.__cause__))[-_TRACEBACK:]
    return data


def message_of(error: BaseException, limit: int = _TEXT) -> str:
    """Return the text of `error`, capped. Lone surrogates, which no log can write, are replaced."""
    try:
        text = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
        return capped(text, limit)
    except BaseException as broken:  # noqa: BLE001 - a third-party exception may fail in __str__
        return f"(its text cannot be read: {type(broken).__name__})"
