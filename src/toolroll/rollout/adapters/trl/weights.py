"""`weights_from_disk`: passes the trainer's weights to SGLang servers through a folder."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from toolroll.rollout.errors import EngineError


def weights_from_disk(
    engine_urls: Sequence[str], folder: str | Path, *, timeout: float = 600.0
) -> Callable[[Any], None]:
    """Return a function for `sync_weights`. The function saves the trainer's model in `folder` and
    makes every engine load it from there. The trainer's step becomes the weight version.

    `engine_urls` are the addresses of the workers, not of a router. All workers must be able to
    read `folder`. `timeout` is the limit for one engine, in seconds. The returned function raises
    `EngineError` if an engine does not load the weights.
    """

    def sync(trainer: Any) -> None:
        trainer.save_model(str(folder))
        if trainer.accelerator.is_main_process:
            for url in engine_urls:
                _load(url, str(folder), str(trainer.state.global_step), timeout)
        trainer.accelerator.wait_for_everyone()

    return sync


def _load(url: str, folder: str, version: str, timeout: float) -> None:
    body = orjson.dumps({"model_path": folder, "weight_version": version})
    request = urllib.request.Request(
        f"{url.rstrip('/')}/update_weights_from_disk",
        data=body,
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer = orjson.loads(response.read())
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")[:500]
        raise EngineError(f"{url} did not load the weights in {folder}: {reason}") from error
    except OSError as error:
        raise EngineError(f"{url} did not load the weights in {folder}: {error}") from error
    if answer.get("success") is not True:
        raise EngineError(
            f"{url} did not load the weights in {folder}: {answer.get('message', answer)}"
        )
