"""`async_rollouts`: the parts that `AsyncGRPOTrainer` needs to train from SGLang's episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl.loop import Job
from toolroll.trainers.trl.rollout_func import read_prompt
from toolroll.trainers.trl.weights import DiskTransfer
from toolroll.trainers.trl.worker import RolloutWorker

_STATE = "toolroll"
"""The entry in `trainer_state.json`."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}
"""The values with which the sampled distribution is the trained one. TRL's loss knows only the
temperature.
"""


def async_rollouts(
    config: Any,
    settings: EpisodeSettings | Mapping[str, Any],
    *,
    model: str,
    prompts: Sequence[Any],
    weights: str | Path,
    workers: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the arguments `rollout_worker`, `weight_transfer` and `callbacks` of
    `AsyncGRPOTrainer`.

    Args:
        config: the trainer's `AsyncGRPOConfig`. Its `vllm_server_base_url` must be the address of
            an SGLang server or router.
        settings: the settings of the episodes. The config's `max_tool_calling_iterations`,
            `max_inflight_tasks`, `token_budget`, `chat_template_kwargs` and `seed` are used for
            settings that are not set.
        model: the model's folder or name, as for the trainer.
        prompts: the column `prompt` of the trainer's dataset: indices of tasks, or lines of
            `toolroll tasks ENV`.
        weights: a folder that this process can write, and each worker can read.
        workers: the workers' addresses, if the engine is a router.

    Raises:
        UsageError: for an unknown setting, environment, agent or parser, or if the trainer's loss
            would not know how the tokens were sampled.

    Example:
        >>> settings = EpisodeSettings(env="desk")
        >>> parts = async_rollouts(config, settings, model=MODEL, prompts=["0"], weights="/tmp/w")
        >>> AsyncGRPOTrainer(MODEL, args=config, train_dataset=dataset, **parts).train()
    """
    settings = EpisodeSettings.checked(settings)
    engine = config.vllm_server_base_url.rstrip("/")
    job = Job(
        _settings(config, settings),
        engine,
        model,
        [read_prompt(prompt) for prompt in prompts],
        _sampling_params(config),
        config.num_generations,
        config.max_staleness,
        _most_rows(config),
    )
    worker = RolloutWorker(job)
    transfer = DiskTransfer(workers or [engine], weights, timeout=config.weight_sync_timeout)
    return {
        "rollout_worker": worker,
        "weight_transfer": transfer,
        "callbacks": [_callback(worker, transfer)],
    }


def _settings(config: Any, settings: EpisodeSettings) -> EpisodeSettings:
    budget = config.token_budget if (config.token_budget or 0) > 0 else None
    iterations, in_flight = config.max_tool_calling_iterations, config.max_inflight_tasks
    settings = settings.filled(
        max_turns=None if iterations is None else iterations + 1,
        concurrency=in_flight if in_flight > 0 else None,
        context_length=budget,
        chat_template_kwargs=config.chat_template_kwargs,
        seed=config.seed,
    )
    if budget is not None and settings.context_length > budget:
        raise UsageError(
            f"context_length={settings.context_length} is above token_budget={budget}: TRL would "
            "drop longer rows"
        )
    return settings


def _sampling_params(config: Any) -> dict[str, Any]:
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(config, name)) not in neutral:
            raise UsageError(
                f"{name}={value} changes what is sampled, but not the logprobs of the trainer's "
                f"loss: set it to {neutral[0]}"
            )
    if config.temperature <= 0:
        raise UsageError(f"temperature={config.temperature}: TRL's loss divides by it")
    # explicit, because a server can have other defaults
    return {
        "max_new_tokens": config.max_completion_length,
        "temperature": config.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }


def _most_rows(config: Any) -> int:
    """Return the number of rows that TRL trains before the oldest of them is too old."""
    step = config.per_device_train_batch_size * config.gradient_accumulation_steps
    versions = max(1, config.max_staleness) * config.weight_sync_steps
    rows: int = step * config.world_size * versions
    return min(rows, config.queue_maxsize) if config.queue_maxsize > 0 else rows


def _callback(worker: RolloutWorker, transfer: DiskTransfer) -> Any:
    """Return the callback that keeps the next group's id in each checkpoint. TRL itself does so
    only for its own worker.
    """

    class RolloutState(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        def on_train_begin(
            self, args: Any, state: Any, control: Any, *, model: Any, **others: Any
        ) -> None:
            transfer.model = model
            worker.first_group = state.stateful_callbacks.get(_STATE, {}).get("next_group", 0)

        def on_step_end(
            self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **others: Any
        ) -> None:
            # The loader is one micro-batch ahead, so the newest group of the step before is the
            # newest that is trained. A part of it may be missing, so it is played again.
            state.stateful_callbacks[_STATE] = {"next_group": worker.first_group}
            groups = train_dataloader.collate_fn.groups_trained
            worker.first_group = max(groups, default=worker.first_group)

    return RolloutState()
