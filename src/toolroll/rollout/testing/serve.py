"""`toolroll engine`: serve the embedded engine until it is interrupted."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import load_tokenizer
from toolroll.rollout.testing.engine import EmbeddedEngine
from toolroll.rollout.testing.policy import Policy, echo, script

logger = logging.getLogger(__name__)

_SHAPES = (
    'It must be a JSON object {"routing key": ["reply", ...]}, or have a line {"routing_key": '
    '"...", "replies": ["...", ...]} for '
    "each key."
)


async def serve(
    tokenizer: str,
    *,
    host: str,
    port: int,
    script_file: Path | None,
    context_length: int,
    latency: float,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    policy = _policy(script_file)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    engine = EmbeddedEngine(
        load_tokenizer(tokenizer),
        policy,
        context_length=context_length,
        latency=latency,
        host=host,
        port=port,
    )
    try:
        async with engine:
            logger.warning("the embedded engine is listening at %s", engine.url)
            await stop.wait()
    except OSError as error:
        raise UsageError(f"the embedded engine cannot listen on {host}:{port}: {error}") from error


def _policy(path: Path | None) -> Policy:
    if path is None:
        return echo
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--script {path} cannot be read: {error}") from error
    return script(_read_script(text, path))


def _read_script(text: str, path: Path) -> dict[str, list[str]]:
    """Return the replies by routing key. `text` is one JSON object of lists, or has a line
    `{"routing_key": ..., "replies": [...]}` for each key.
    """
    try:
        lines = _lines(text)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"--script {path} is not a script: {error!r}. {_SHAPES}") from error
    return _checked(lines, path)


def _lines(text: str) -> Any:
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        rows = [row for row in text.splitlines() if row.strip()]
        if len(rows) < 2:
            raise
        return {row["routing_key"]: row["replies"] for row in map(json.loads, rows)}
    one_line = isinstance(whole, dict) and set(whole) == {"routing_key", "replies"}
    return {whole["routing_key"]: whole["replies"]} if one_line else whole


def _checked(lines: Any, path: Path) -> dict[str, list[str]]:
    rows = lines.values() if isinstance(lines, dict) else ["not an object"]
    if not all(
        isinstance(row, list) and all(isinstance(reply, str) for reply in row) for row in rows
    ):
        raise UsageError(f"--script {path} is not a script. {_SHAPES}")
    return dict(lines)
