"""`toolroll serve` and its options."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from rich.console import Console

from toolroll.rollout.cli.console import print_line
from toolroll.rollout.cli.options import (
    flag_of,
    given_values,
    option_parameters,
    with_parameters,
)
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.config import RolloutArgs
from toolroll.rollout.runs.usage_errors import named
from toolroll.rollout.runtime.complaints import complaints
from toolroll.rollout.runtime.event_loop import run
from toolroll.rollout.server.endpoint_settings import EndpointSettings

M = TypeVar("M", bound=BaseModel)
console = Console()


class _ServeArgs(RolloutArgs):
    """The settings of the model with the help and the defaults of `toolroll serve`, and its options
    that are not fields of `RolloutArgs` or `EndpointSettings`.
    """

    hf_checkpoint: str | None = Field(
        description="folder or name of the served model's tokenizer; `embedded` for the one in the "
        "package"
    )
    engine_url: str | None = Field(
        default="http://127.0.0.1:30000", description="address of SGLang or its router"
    )
    api_key_env: str | None = Field(
        default=None,
        description="environment variable with the API key that clients must send; required unless "
        "--host is a loopback address",
    )
    tool_call_parser: str = Field(
        default="auto",
        description="the model's tool call format, a name of SGLang's --tool-call-parser; auto: "
        "infer it from the chat template",
    )
    chat_template: str | None = Field(
        default=None, description="a Jinja file that replaces the tokenizer's chat template"
    )
    history: Literal["fork", "preserve"] = Field(
        default="fork",
        description="if the template rewrites earlier turns: start a new sequence (fork), or keep "
        "the earlier tokens (preserve)",
    )
    context_length: int | None = Field(
        default=None,
        ge=1,
        description="context length in tokens; needed only if the engine reports none",
    )
    max_resumes: int = Field(
        default=3,
        ge=0,
        description="maximum number of times that one turn is resumed after the engine aborted it",
    )
    out: Path | None = Field(
        default=None,
        description="folder for the sessions: episodes.jsonl has the finished sessions, and the "
        "next start restores the unfinished ones",
    )
    engine_timeout: float = Field(
        default=0.0,
        ge=0,
        description="seconds to keep trying if the engine does not answer at all; 0: only a few "
        "retries",
    )
    no_gc: bool = Field(
        default=False, description="do not change the settings of Python's garbage collector"
    )
    allow_model_mismatch: bool = Field(
        default=False, description="only warn if the engine's model has another tokenizer"
    )


_PANELS = {
    "Options": "hf_checkpoint engine_url host port api_key_env tool_call_parser chat_template "
    "apply_chat_template_kwargs history context_length verify out engine_timeout no_gc "
    "allow_model_mismatch",
    "Requests": "sampling_params default_max_tokens max_resumes seed server_tools model_names",
    "Sessions and limits": "grace idle max_sessions max_body max_text max_items",
}
"""The settings in each panel of `toolroll serve --help`, separated by spaces."""
_FLAGS = {
    "api_key": "--api-key-env",
    "default_max_tokens": "--max-tokens",
    "engine_url": "--engine",
    "hf_checkpoint": "--model",
    "tool_call_parser": "--parser",
    "apply_chat_template_kwargs": "--chat-template-kwargs",
}
"""Maps settings to their flags if the names differ."""


def _serve(**options: Any) -> None:
    """Serve an OpenAI-compatible endpoint that keeps the exact tokens of every session.

    Example: toolroll serve --model Qwen/Qwen3-8B --engine http://127.0.0.1:30000
    """
    from toolroll.rollout.server.http.serve import serve as serve_endpoint

    own = {**options, "pace_gc": not options["no_gc"], "verify": None}  # it is the endpoint's
    args = _valid(_ServeArgs, own)
    settings = _valid(EndpointSettings, {**options, "api_key": _key(args.api_key_env)})
    _log_requests()
    with named():
        run(serve_endpoint(args, settings, _ready, args.out))


serve = with_parameters(
    _serve,
    option_parameters(
        {**_ServeArgs.model_fields, **EndpointSettings.model_fields},
        _PANELS,
        flags=_FLAGS,
        defaults=True,
    ),
)


def _key(variable: str | None) -> str | None:
    """Return the key in the environment variable `variable`. Raise `UsageError` if it is not
    set.
    """
    key = os.environ.get(variable) if variable is not None else None
    if variable is not None and not key:
        raise UsageError(f"--api-key-env {variable}: that variable is not set")
    return key


def _ready(url: str) -> None:
    print_line(
        console, f"The endpoint serves at {url}/v1; a session's address is {url}/sessions/NAME/v1"
    )


def _log_requests() -> None:
    """Log one line per request to standard error. From all other loggers, log only warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("toolroll.rollout.server").setLevel(logging.INFO)


def _valid(kind: type[M], options: Mapping[str, Any]) -> M:
    try:
        return kind(**given_values(kind, options, flags=_FLAGS))
    except ValidationError as error:
        raise UsageError(complaints(error, lambda name: flag_of(name, _FLAGS))) from error
