"""`load_engine`: the embedded engine with a small language model. `serve`: `toolroll engine`, which
serves the embedded engine until it is interrupted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.tokenizers import DESK_MODEL, desk_model_path, load_tokenizer
from toolroll.rollout.runtime.complaints import complaints
from toolroll.rollout.runtime.event_loop import stop_signals
from toolroll.rollout.settings import EmbeddedEngineSettings
from toolroll.testing.engine import EmbeddedEngine
from toolroll.testing.language_model import LanguageModel, ModelFolderError
from toolroll.testing.policy import Policy, PolicyRequest, Reply, echo, script

logger = logging.getLogger(__name__)

_SCRIPT = TypeAdapter(dict[str, list[str]])
_CONTEXT_LENGTH = 32768
_RUNNING = 64


def load_engine(folder: str | Path, **options: Any) -> EmbeddedEngine:
    """Return an engine that serves the language model in `folder`. The folder contains a small
    Llama network and its tokenizer, in the format of Hugging Face. The engine samples in float32
    with numpy, and does not need torch.

    `options` are parameters of `EmbeddedEngine`. By default, the context length, the vocabulary and
    the stop tokens are the model's, and `max_running` is 64. Raise `UsageError` if the folder
    cannot be served.

    Example::

        async with load_engine("path/to/model", seed=7) as engine:
            ...  # SGLang's /generate at engine.url
    """
    try:
        model = LanguageModel.from_folder(folder)
    except ModelFolderError as error:
        raise UsageError(str(error)) from error
    config, tokenizer = model.config, load_tokenizer(str(folder))
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"{folder}: the tokenizer has {len(tokenizer)} ids, but the network has "
            f"{config.vocab_size}"
        )
    length, limit = options.get("context_length", 0), config.max_position_embeddings
    if length > limit:
        raise UsageError(f"{folder}: the context length is at most {limit}, not {length}")
    eos = tokenizer.eos_token_id
    defaults: dict[str, Any] = {
        "context_length": limit,
        "stop_token_ids": sorted({*config.eos_token_ids, *([] if eos is None else [eos])}),
        "vocab_size": config.vocab_size,
        "max_running": _RUNNING,
    }
    return EmbeddedEngine(tokenizer, model, **(defaults | options))


async def serve(settings: EmbeddedEngineSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raise `UsageError` if a setting is wrong."""
    engine = _engine(settings)
    stop = asyncio.Event()
    try:
        with stop_signals(lambda _: stop.set()):
            async with engine:
                logger.warning("the embedded engine is listening at %s", engine.url)
                await stop.wait()
    except OSError as error:
        raise UsageError(
            f"the embedded engine cannot listen on {settings.host}:{settings.port}: {error}; "
            "choose another --port"
        ) from error


def _engine(settings: EmbeddedEngineSettings) -> EmbeddedEngine:
    address: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "seed": settings.seed,
    }
    scripted = [name for name in ("tokenizer", "script", "latency") if getattr(settings, name)]
    if scripted and settings.model is not None:
        raise UsageError(f"--{scripted[0]} cannot be combined with --model")
    if scripted:
        return EmbeddedEngine(
            load_tokenizer(settings.tokenizer or "embedded"),
            _policy(settings.script),
            context_length=settings.context_length or _CONTEXT_LENGTH,
            latency=settings.latency,
            **address,
        )
    if settings.context_length is not None:
        address["context_length"] = settings.context_length
    model = settings.model or DESK_MODEL
    return load_engine(desk_model_path() if model == DESK_MODEL else model, **address)


def _policy(path: Path | None) -> Policy:
    if path is None:
        return echo
    try:
        replies = _SCRIPT.validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise UsageError(f"--script {path} cannot be read: {error}") from error
    except ValidationError as error:
        raise UsageError(
            f'--script {path} is not a JSON object {{"routing key": ["reply", ...]}}: '
            f"{complaints(error)}"
        ) from error
    return _warn_if_used_up(replies)


def _warn_if_used_up(replies: dict[str, list[str]]) -> Policy:
    """Return a policy with the replies of `script(replies)`. It logs a warning, once per routing
    key, if a request needs a reply after all replies of its routing key were sent.
    """
    policy, used_up = script(replies), set[str]()

    def reply(request: PolicyRequest) -> str | Reply | Awaitable[str | Reply]:
        key = request.routing_key
        if key in replies and key not in used_up and request.call >= len(replies[key]):
            used_up.add(key)
            logger.warning(
                "all %d replies of %r were sent; to send them again, restart this engine",
                len(replies[key]),
                key,
            )
        return policy(request)

    return reply
