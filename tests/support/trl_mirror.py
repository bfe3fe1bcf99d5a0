"""What the TRL adapter reads of a `GRPOTrainer` (TRL 1.16.0)."""

from __future__ import annotations

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
