"""The errors that the endpoint returns to clients, with stable codes. `api_error` converts all
other exceptions.

`ApiError.retry` becomes the header `x-should-retry`, which the OpenAI SDKs follow. So clients retry
only requests that can succeed.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from toolroll.rollout.errors import (
    ContextOverflowError,
    EngineError,
    TemplateError,
    TokenError,
    ToolrollError,
    UsageError,
)


class ApiError(ToolrollError):
    """An error response: the HTTP `status`, a stable `code`, and the `param` at fault. `retry` is
    True if the same request may succeed later.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry = retry

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES = {
    **dict.fromkeys((400, 404, 405, 408, 409, 413, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class UnknownFieldError(ApiError):
    """The body has a field that its API does not have, or that the endpoint cannot honor."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(400, "unsupported_parameter", message, param=param)


def refused(param: str, message: str, *, code: str = "unsupported_parameter") -> ApiError:
    """Return a 400 error that names the field at fault."""
    return ApiError(400, code, message, param=param)


def invalid(param: str, message: str) -> ApiError:
    """Return a 400 error for a field whose value is not valid."""
    return refused(param, message, code="invalid_value")


def not_rendered(place: str) -> ApiError:
    """Return the error for a field whose content would not be rendered. `place` is the field's path
    in the body, such as `messages[0].audio`.
    """
    return refused(place, f"{place} cannot be honored: the endpoint does not render it")


def server_stopping() -> ApiError:
    """Return the error of a server that is stopping. A retry can succeed after its restart."""
    problem = "the server is stopping: send the request again"
    return ApiError(503, "server_stopping", problem, retry=True)


def api_error(error: BaseException) -> ApiError:
    """Return the `ApiError` that the client gets for `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflowError):
        return ApiError(400, "context_length_exceeded", str(error), param="messages")
    if isinstance(error, TemplateError):
        return ApiError(400, "invalid_messages", str(error), param="messages")
    if isinstance(error, UsageError):
        return ApiError(400, "unsupported_parameter", str(error), param=_param_in(str(error)))
    if isinstance(error, TimeoutError):
        return ApiError(504, "timeout", "the engine did not answer in time", retry=True)
    if isinstance(error, EngineError):
        return _engine_error(error)
    if isinstance(error, TokenError):
        return ApiError(500, "token_error", str(error))
    return ApiError(500, "internal_error", f"the endpoint itself failed: {type(error).__name__}")


def _engine_error(error: EngineError) -> ApiError:
    status = error.status
    if status == 429 or status == 503:
        return ApiError(503, "engine_overloaded", str(error), retry=True)
    if status is not None and 400 <= status < 500:
        return ApiError(400, "engine_refused", str(error))
    return ApiError(502, "engine_error", str(error), retry=True)


def _param_in(message: str) -> str | None:
    """Return the first parameter name in quotation marks in `message`."""
    parts = message.split("'", 2)
    return parts[1] if len(parts) == 3 else None


def refusal_of(error: ValidationError, *within: str) -> ApiError:
    """Return the `ApiError` (400) for `error`, pydantic's error for a request's body. `within`: the
    path to the validated object, if it is only a part of the body.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = next((entry for entry in errors if _is_unknown(entry, errors[0])), errors[0])
    parts = [*within, *(part for part in first["loc"] if not _is_branch(part))]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(
        "."
    )
    if first["type"] == "extra_forbidden":
        hint = _INSTEAD.get(param)
        problem = f"this endpoint cannot honor {param!r}" + (f": {hint}" if hint else "")
        return UnknownFieldError(param, problem)
    return invalid(param, f"{param}: {first['msg']}")


def _is_unknown(entry: ErrorDetails, first: ErrorDetails) -> bool:
    """Return True if `entry` reports an unknown field in the same top-level field as `first`. For a
    union, `first` is only about its first branch, so `entry` may be the actual cause.
    """
    return entry["type"] == "extra_forbidden" and entry["loc"][:1] == first["loc"][:1]


def _is_branch(part: int | str) -> bool:
    """Return True if `part` of an error's location is pydantic's name for a branch of a union, such
    as `NamedChoice`, `list[str]` or `literal[...]`.
    """
    return isinstance(part, str) and (part[:1].isupper() or "[" in part or part in ("str", "int"))


_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "web_search_options": "offer a function tool that searches",
}
