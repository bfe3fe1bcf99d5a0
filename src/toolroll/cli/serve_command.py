"""`toolroll serve` and its options."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from toolroll.cli.display import Output, print_line
from toolroll.cli.options import flag_of, option_parameters, used_options, with_parameters
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.event_loop import run
from toolroll.rollout.settings import MaxResumes, ModelName, RolloutArgs

console = Output()


class ServeArgs(RolloutArgs):
    """The model that `toolroll serve` serves, and where its key and its sessions are."""

    model: ModelName  # pyright: ignore[reportGeneralTypeIssues] (required here)
    max_resumes: MaxResumes = 3  # a client wants an answer, not a part of one
    api_key_env: str | None = Field(
        default=None,
        description="The environment variable that holds the API key that clients must send; "
        "required unless --host is a loopback address.",
    )
    out: Path | None = Field(
        default=None,
        description="Folder for the sessions: episodes.jsonl has the finished sessions, and the "
        "next start restores the unfinished ones.",
    )


_PANELS = {
    "Options": "model engine host port api_key_env parser chat_template chat_template_kwargs "
    "trust_remote_code context_length verify out engine_timeout allow_model_mismatch",
    "Requests": "sampling_params history max_resumes server_tools",
    "Sessions and limits": "require_session session_cache grace idle max_sessions max_body "
    "max_text max_items pace_gc",
}
"""The settings in each panel of `toolroll serve --help`, separated by spaces."""


def _serve(**options: Any) -> None:
    """Serve an OpenAI-compatible endpoint that keeps the exact tokens of every session.

    Example: toolroll serve --model Qwen/Qwen3-8B --engine http://127.0.0.1:30000
    """
    from toolroll.endpoint.http.serve import serve as serve_endpoint

    of_model = used_options(ServeArgs, {**options, "verify": None})  # the endpoint checks
    args = ServeArgs.read(of_model, name_of=flag_of)
    used = used_options(EndpointSettings, {**options, "api_key": _key(args.api_key_env)})
    settings = EndpointSettings.read(used, name_of=_flag_of)
    _log_requests()
    ready = partial(_ready, require_session=settings.require_session)
    run(serve_endpoint(args, settings, ready, args.out))


serve = with_parameters(
    _serve,
    option_parameters({**ServeArgs.model_fields, **EndpointSettings.model_fields}, _PANELS),
)


def _flag_of(name: str) -> str:
    return flag_of("api_key_env" if name == "api_key" else name)


def _key(variable: str | None) -> str | None:
    """Return the key in the environment variable `variable`. Raise `UsageError` if not set."""
    key = os.environ.get(variable) if variable is not None else None
    if variable is not None and not key:
        raise UsageError(f"--api-key-env {variable}: that variable is not set")
    return key


def _ready(url: str, *, require_session: bool) -> None:
    unnamed = "" if require_session else f"; at {url}/v1, each conversation is a session"
    print_line(console, f"The endpoint serves the session NAME at {url}/sessions/NAME/v1{unnamed}")


def _log_requests() -> None:
    """Log one line per request to standard error. From all other loggers, log only warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("toolroll.endpoint").setLevel(logging.INFO)
