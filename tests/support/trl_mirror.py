"""What the TRL adapters read of TRL's own objects (1.16.0)."""

from types import SimpleNamespace
from typing import Any

from support.standins import named

from toolroll.testing import load_embedded_tokenizer


def a_trainer(**config: Any) -> Any:
    """What the adapter reads of a `GRPOTrainer`."""
    settings = {
        "max_completion_length": 4096, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "generation_kwargs": None, "chat_template_kwargs": None,
        "seed": 42,
    }  # fmt: skip
    accelerator = named(
        "accelerate:Accelerator",
        num_processes=1,
        process_index=0,
        is_main_process=True,
        wait_for_everyone=lambda: None,
        unwrap_model=lambda model: model,
    )
    return named(
        "trl.trainer.grpo_trainer:GRPOTrainer",
        args=named("trl.trainer.grpo_config:GRPOConfig", **{**settings, **config}),
        processing_class=load_embedded_tokenizer(),
        accelerator=accelerator,
        model=SimpleNamespace(),
        state=named("transformers.trainer_callback:TrainerState", global_step=0),
    )


def an_async_config(**config: Any) -> Any:
    """What the adapter reads of an `AsyncGRPOConfig`."""
    settings = {
        "vllm_server_base_url": "http://localhost:8000", "weight_sync_timeout": 1800,
        "num_generations": 2, "max_completion_length": 64, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "chat_template_kwargs": None,
        "max_tool_calling_iterations": None, "token_budget": None, "max_inflight_tasks": -1,
        "max_staleness": 4, "queue_maxsize": 1024, "weight_sync_steps": 1,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "world_size": 1,
        "seed": 42,
    }  # fmt: skip
    real = "trl.experimental.async_grpo.async_grpo_config:AsyncGRPOConfig"
    return named(real, **{**settings, **config})
