"""`toolroll serve` and its options."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from toolroll.rollout.cli.console import print_line
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.config import json_object
from toolroll.rollout.runs.usage_errors import named
from toolroll.rollout.runtime.complaints import complaints
from toolroll.rollout.runtime.event_loop import run

if TYPE_CHECKING:
    from toolroll.rollout.model.config import RolloutArgs
    from toolroll.rollout.server.config import EndpointSettings

console = Console()
_FLAGS = {
    "api_key": "api-key-env",
    "default_max_tokens": "max-tokens",
    "engine_url": "engine",
    "hf_checkpoint": "model",
    "tool_call_parser": "parser",
    "apply_chat_template_kwargs": "chat-template-kwargs",
}
"""Maps settings to their flags if the names differ."""

_REQUESTS = "Requests"
_LIMITS = "Sessions and limits"
_EngineTimeout = Annotated[
    float,
    typer.Option(
        help="seconds to keep trying if the engine does not answer at all; 0: only a few retries"
    ),
]
_NoGc = Annotated[
    bool, typer.Option("--no-gc", help="do not change the settings of Python's garbage collector")
]
_Mismatch = Annotated[
    bool,
    typer.Option(
        "--allow-model-mismatch", help="only warn if the engine's model has another tokenizer"
    ),
]


def serve(
    model: Annotated[
        str,
        typer.Option(
            help="folder or name of the served model's tokenizer; `embedded` for the one in the "
            "package"
        ),
    ],
    engine: Annotated[
        str, typer.Option(help="address of SGLang or its router")
    ] = "http://127.0.0.1:30000",
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port")] = 8400,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="environment variable with the API key that clients must send; required unless "
            "--host is a loopback address"
        ),
    ] = None,
    parser: Annotated[
        str,
        typer.Option(
            help="the model's tool call format, a name of SGLang's --tool-call-parser; auto: infer "
            "it from the chat template"
        ),
    ] = "auto",
    chat_template: Annotated[
        str | None, typer.Option(help="a Jinja file that replaces the tokenizer's chat template")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="variables of the chat template")
    ] = None,
    history: Annotated[
        str,
        typer.Option(
            metavar="[fork|preserve]",
            help="if the template rewrites earlier turns: start a new sequence (fork), or keep the "
            "earlier tokens (preserve)",
        ),
    ] = "fork",
    sampling_params: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="defaults for sampling parameters that a request does not set, by SGLang's names",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="max_tokens of requests that set none; default: the rest of the context",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(help="context length in tokens; needed only if the engine reports none"),
    ] = None,
    max_resumes: Annotated[
        int,
        typer.Option(
            help="maximum number of times that one turn is resumed after the engine aborted it",
            rich_help_panel=_REQUESTS,
        ),
    ] = 3,
    verify: Annotated[
        str,
        typer.Option(
            metavar="[off|sample|always]",
            help="when to check sequences with transformers: never (off), before they are returned "
            "(sample), or also after every turn (always)",
        ),
    ] = "sample",
    seed: Annotated[
        str,
        typer.Option(
            metavar="[best_effort|refuse]",
            help="if a request has a seed but the engine is not deterministic: send the seed "
            "anyway (best_effort), or refuse the request (refuse)",
            rich_help_panel=_REQUESTS,
        ),
    ] = "best_effort",
    server_tools: Annotated[
        str,
        typer.Option(
            metavar="[refuse|drop]",
            help="if a request offers a tool of the provider's servers, such as web_search: refuse "
            "the request (refuse), or answer without that tool (drop)",
            rich_help_panel=_REQUESTS,
        ),
    ] = "refuse",
    model_names: Annotated[
        str,
        typer.Option(
            metavar="[any|own]",
            help="which model a request may name: any, or only the served one (own)",
            rich_help_panel=_REQUESTS,
        ),
    ] = "any",
    grace: Annotated[
        float,
        typer.Option(
            help="seconds for which a request continues after its client has disconnected",
            rich_help_panel=_LIMITS,
        ),
    ] = 30.0,
    idle: Annotated[
        float,
        typer.Option(
            help="seconds after which an unused session is dropped", rich_help_panel=_LIMITS
        ),
    ] = 3600.0,
    max_sessions: Annotated[
        int, typer.Option(help="limit of open sessions", rich_help_panel=_LIMITS)
    ] = 10_000,
    max_body: Annotated[
        int,
        typer.Option(
            help="limit of one request's body in bytes, decompressed", rich_help_panel=_LIMITS
        ),
    ] = 32 * 2**20,
    max_text: Annotated[
        int,
        typer.Option(
            help="limit of one text in a request, in bytes: a message, a tool result, a prompt",
            rich_help_panel=_LIMITS,
        ),
    ] = 2**20,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for the sessions: episodes.jsonl has the finished sessions, and the next "
            "start restores the unfinished ones"
        ),
    ] = None,
    engine_timeout: _EngineTimeout = 0.0,
    *,
    no_gc: _NoGc = False,
    allow_model_mismatch: _Mismatch = False,
) -> None:
    """Serve an OpenAI-compatible endpoint that keeps the exact tokens of every session.

    Example: toolroll serve --model Qwen/Qwen3-8B --engine http://127.0.0.1:30000
    """
    from toolroll.rollout.model.config import RolloutArgs
    from toolroll.rollout.server.config import EndpointSettings

    args = _valid(
        RolloutArgs,
        engine_url=engine,
        hf_checkpoint=model,
        tool_call_parser=parser,
        chat_template=chat_template,
        apply_chat_template_kwargs=json_object(chat_template_kwargs, "--chat-template-kwargs")
        or {},
        history=history,
        context_length=context_length,
        max_resumes=max_resumes,
        engine_timeout=engine_timeout,
        pace_gc=not no_gc,
        allow_model_mismatch=allow_model_mismatch,
    )
    settings = _valid(
        EndpointSettings,
        host=host,
        port=port,
        api_key=_key(api_key_env),
        sampling_params=json_object(sampling_params, "--sampling-params") or {},
        default_max_tokens=max_tokens,
        model_names=model_names,
        seed=seed,
        server_tools=server_tools,
        verify=verify,
        grace=grace,
        idle=idle,
        max_sessions=max_sessions,
        max_body=max_body,
        max_text=max_text,
    )
    _run(args, settings, out)


def _run(args: RolloutArgs, settings: EndpointSettings, out: Path | None) -> None:
    from toolroll.rollout.server.serve import serve as serve_endpoint

    _log_requests()
    with named():
        run(serve_endpoint(args, settings, _ready, out))


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


def _valid(kind: Any, **values: Any) -> Any:
    try:
        return kind(**values)
    except ValidationError as error:
        raise UsageError(complaints(error, _flag)) from error


def _flag(setting: str) -> str:
    return f"--{_FLAGS.get(setting, setting.replace('_', '-'))}"
