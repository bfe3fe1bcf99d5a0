"""The errors that toolroll raises. Messages state what is wrong, where, and what to do.

    ToolrollError
      UsageError
      RolloutError
        EngineError
          EngineUnreachableError
          ContextOverflowError
          CompletionError
        TokenError
          HistoryRewrittenError
        TemplateError
        EnvironmentFailure
        UserSimulatorError
        TimeLimitError
      ActionError

The caller can fix a `UsageError`. A `RolloutError` means that a part of the rollout failed. If it
ends an episode, the episode's `stop_reason` says what failed. An `ActionError` is a mistake of the
model.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TRACEBACK = 4000
"""The number of characters that an episode's `info` keeps, from the end of a traceback."""
_TEXT = 2000
"""The number of characters that errors and episodes keep, from the start of a message."""
_SLACK = 200
"""`capped` shortens a text only if it exceeds the limit by more than this number of characters. So
if a message quotes a text that was shortened already, it is not shortened again.
"""


def capped(text: str, limit: int = _TEXT) -> str:
    """Return the first `limit` characters of `text`, and the number of characters left out. Return
    a text that is only a little longer than `limit` unchanged.
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

    A long message is shortened, because it may quote a server's response or an environment.
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

    Other episodes would fail too, so agents do not catch this error, and it ends the run.
    """


class ContextOverflowError(EngineError):
    """The prompt leaves no room for an answer in the model's context. Such a prompt is not sent to
    the engine, unless the context length is unknown. `prompt_too_long` creates this error.
    """


def prompt_too_long(
    tokens: int | None, most: int | None, reported: str = "", **fields: Any
) -> ContextOverflowError:
    """Return the error for a prompt of `tokens` tokens, if the engine accepts at most `most`. Both
    are None if the engine does not report them. `reported`: the engine's own message, if it refused
    the prompt. `fields`: see `EngineError`.

    Agents recognize a prompt that is too long by the message, not by the code: Claude Code, pi,
    langchain and newer versions of litellm by its first words, older versions of litellm by
    "maximum input length is". Then they shorten the conversation.
    """
    sizes, limit = f": {tokens} tokens > {most} maximum", f"{most} tokens"
    if tokens is None:
        sizes, limit = "", "exceeded"
    return ContextOverflowError(
        f"prompt is too long{sizes}. The maximum input length is {limit}: shorten the conversation"
        f"{f' ({reported})' if reported else ''}",
        **fields,
    )


class CompletionError(EngineError):
    """The engine's response contradicts itself (ids, logprobs and counts do not agree)."""


class TokenError(RolloutError):
    """The recorded tokens may differ from the tokens that the engine got or sampled, so they are
    not trained on.
    """


class TemplateError(RolloutError):
    """The chat template cannot do what was requested, or refuses the conversation. The message
    gives the reason.
    """


class HistoryRewrittenError(TokenError):
    """The chat template now renders an earlier part of the conversation differently, so the next
    prompt does not begin with the recorded tokens.

    `reason` names the part that changed. The caller may catch this error and start a new sequence
    (a fork).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template rewrites history: {reason}")
        self.reason = reason


class EnvironmentFailure(RolloutError):
    """The environment failed, and the model's action was not the cause."""


class UserSimulatorError(RolloutError):
    """The user simulator failed. For example, its server failed, or its answer was empty."""


class TimeLimitError(RolloutError):
    """An episode, or one step of its environment, exceeded its time limit."""


class ActionError(ToolrollError):
    """Raised by an environment for a mistake in the model's action. The model gets the message as
    the observation.
    """


def first_error(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first `ToolrollError` in `group`, or its first exception if it has none."""
    first: Exception = group.subgroup(ToolrollError) or group
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first


def describe(error: BaseException) -> dict[str, Any]:
    """Return `error` as a dict for an episode's `info`: its type and message. Long texts are
    shortened.

    The dict of an `EngineError` also has the status, the attempts and the body. An exception that
    is not toolroll's own, or the cause of an `EnvironmentFailure`, adds its traceback.
    """
    data: dict[str, Any] = {"type": type(error).__name__, "message": message_of(error)}
    if isinstance(error, EngineError):
        data |= {"status": error.status, "attempts": error.attempts, "body": capped(error.body)}
    cause = error.__cause__ if isinstance(error, EnvironmentFailure) else error
    if cause is not None and not isinstance(cause, ToolrollError):
        data["traceback"] = "".join(traceback.format_exception(cause))[-_TRACEBACK:]
    return data


def place_of(error: BaseException, file: str | None = None) -> str:
    """Return where `error` was raised, such as " (env.py, line 7, in step)": the innermost line in
    `file`, or the innermost line of all if `file` is not in the traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    inner = next((frame for frame in reversed(frames) if frame.filename == file), None)
    inner = inner or (frames[-1] if frames else None)
    return f" ({Path(inner.filename).name}, line {inner.lineno}, in {inner.name})" if inner else ""


def error_in(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error in an episode's `info` (see `describe`), or {} if there is none."""
    error = info.get("error")
    return error if isinstance(error, Mapping) else {}


def message_of(error: BaseException, limit: int = _TEXT) -> str:
    """Return the text of `error`, capped. Lone surrogates, which no log can write, are replaced."""
    try:
        text = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
        return capped(text, limit)
    except BaseException as broken:  # noqa: BLE001 - a third-party exception may fail in __str__
        return f"(its text cannot be read: {type(broken).__name__})"
