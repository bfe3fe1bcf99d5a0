"""Weights from TRL's trainers to SGLang, through a folder: `weights_from_disk` for `GRPOTrainer`,
and `DiskTransfer` for `AsyncGRPOTrainer`.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from toolroll.rollout.errors import EngineError, UsageError


def weights_from_disk(
    engine_urls: Sequence[str], folder: str | Path, *, timeout: float = 600.0
) -> Callable[[Any], None]:
    """Return a function for `sync_weights`. The function saves the trainer's model in `folder` and
    makes every engine load it from there. The trainer's step becomes the weight version.

    `engine_urls` are the addresses of the workers, not of a router. All workers must be able to
    read `folder`. `timeout` is the limit for one engine, in seconds. The returned function raises
    `EngineError` if an engine does not load the weights, and `UsageError` if the model is a PEFT
    adapter: TRL would save the adapter alone.
    """

    def sync(trainer: Any) -> None:
        _check_whole(trainer.accelerator.unwrap_model(trainer.model))
        trainer.save_model(str(folder))
        if trainer.accelerator.is_main_process:
            for url in engine_urls:
                _load(url, str(folder), str(trainer.state.global_step), timeout)
        trainer.accelerator.wait_for_everyone()

    return sync


class DiskTransfer:
    """TRL's `WeightTransferProtocol` for SGLang servers that can read `folder`.

    `engine_urls` are the addresses of the workers, not of a router. `timeout` is the limit for one
    request, in seconds. The number of the transfer is the weight version, which is also TRL's
    `model_version`. All methods raise `EngineError` if an engine does not do what they ask.
    """

    def __init__(self, engine_urls: Sequence[str], folder: str | Path, *, timeout: float) -> None:
        self.model: Any = None
        """The trained model, whose method writes the folder. The callback sets it."""
        self._urls = engine_urls
        self._folder = str(folder)
        self._timeout = timeout
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Raise `UsageError` if the model is a PEFT adapter."""
        _check_whole(self.model)

    def pause(self) -> None:
        """Stop sampling. The turns in flight continue after `resume`, with the new weights."""
        for url in self._urls:
            _post(url, "pause_generation", {"mode": "retract"}, self._timeout)

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Save the weights, and let each engine load them. The model writes the names of its
        checkpoint, because transformers trains the weights of experts under other names.
        """
        # TRL's other processes take part in each step of the iterator
        state = {name: tensor.cpu() for name, tensor in iterator}
        self.model.save_pretrained(self._folder, state_dict=state)
        self._version += 1
        for url in self._urls:
            _load(url, self._folder, str(self._version), self._timeout)

    def resume(self) -> None:
        """Continue to sample."""
        for url in self._urls:
            _post(url, "continue_generation", {}, self._timeout)

    def destroy(self) -> None:
        """Do nothing: after a failed transfer, an engine stays paused, so that it samples nothing
        from wrong weights. The next training's first transfer resumes it.
        """


def _check_whole(model: Any) -> None:
    if getattr(model, "peft_config", None):
        raise UsageError(
            "SGLang loads whole models from the folder, and this trainer trains a PEFT adapter: "
            "train all weights (or, with GRPOTrainer, write a sync_weights that loads the adapter)"
        )


def _load(url: str, folder: str, version: str, timeout: float) -> None:
    body = {"model_path": folder, "weight_version": version}
    answer = _post(url, "update_weights_from_disk", body, timeout)
    if answer.get("success") is not True:
        raise EngineError(
            f"{url} did not load the weights in {folder}: {answer.get('message', answer)}"
        )


def _post(url: str, route: str, body: dict[str, str], timeout: float) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url.rstrip('/')}/{route}",
        data=orjson.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer: dict[str, Any] = orjson.loads(response.read())
            return answer
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")[:500]
        raise EngineError(f"{url}/{route} failed with {body}: {reason}") from error
    except OSError as error:
        raise EngineError(f"{url}/{route} failed with {body}: {error}") from error
