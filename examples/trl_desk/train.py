"""GRPO on the desk environment with TRL 1.16.0, sampled by an SGLang server.

MODEL, ENGINE_URL and WEIGHTS (a folder that this process and the server both see) are read from
the environment.
"""

import os
from typing import Any

from toolroll import load_environment
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl import RolloutFunc, make_rollout_func, reward, weights_from_disk

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
ENGINE_URL = os.environ.get("ENGINE_URL", "http://127.0.0.1:30000")
WEIGHTS = os.environ.get("WEIGHTS", "/dev/shm/toolroll-weights")

CONFIG: dict[str, Any] = {
    "output_dir": "out/trl-desk",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 4096,  # of a turn, and of the whole completion
    "max_steps": 200,
}


def rows() -> list[dict[str, Any]]:
    """Return one row per task. The row's prompt is the task's index."""
    return [{"prompt": str(task.index)} for task in load_environment("desk").tasks("test")]


def rollout_func() -> RolloutFunc:
    """Return the function that plays the episodes. Before the first rollout of each step, it gives
    the server the current weights.
    """
    return make_rollout_func(
        EpisodeSettings(env="desk", max_turns=12),
        engine=ENGINE_URL,
        sync_weights=weights_from_disk([ENGINE_URL], WEIGHTS),
    )


def main() -> None:
    """Train the model."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    rollout = rollout_func()
    try:
        GRPOTrainer(
            MODEL,
            reward_funcs=reward,
            args=GRPOConfig(**CONFIG),
            train_dataset=Dataset.from_list(rows()),
            rollout_func=rollout,
        ).train()
    finally:
        rollout.close()


if __name__ == "__main__":
    main()
