"""Asynchronous GRPO on the desk environment with TRL 1.16.0, sampled by an SGLang server. All
sequences of an episode are trained, and a shared prefix is computed once.

MODEL, ENGINE_URL and WEIGHTS (a folder that this process and the server both see) are read from
the environment.
"""

import os
from typing import Any

from toolroll import load_environment
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl import async_rollouts

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
ENGINE_URL = os.environ.get("ENGINE_URL", "http://127.0.0.1:30000")
WEIGHTS = os.environ.get("WEIGHTS", "/dev/shm/toolroll-weights")

CONFIG: dict[str, Any] = {
    "output_dir": "out/trl-desk-async",
    "vllm_server_base_url": ENGINE_URL,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "token_budget": 16384,  # of one forward pass, and of an episode
    "max_completion_length": 4096,  # of a turn
    "max_steps": 200,
    "report_to": [],
}


def main() -> None:
    """Train the model."""
    from datasets import Dataset
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    config = AsyncGRPOConfig(**CONFIG)
    prompts = [str(task.index) for task in load_environment("desk").tasks("test")]
    settings = EpisodeSettings(env="desk", max_turns=12)
    parts = async_rollouts(config, settings, model=MODEL, prompts=prompts, weights=WEIGHTS)
    dataset = Dataset.from_dict({"prompt": prompts})
    AsyncGRPOTrainer(MODEL, args=config, train_dataset=dataset, **parts).train()


if __name__ == "__main__":
    main()
