"""TRL's own `GRPOTrainer` trains on the CPU from our episodes."""

from __future__ import annotations

import math
from pathlib import Path
from runpy import run_path
from typing import Any

from support.desk_episodes import ByTask, known_tasks
from support.trl_toy import InProcess, grpo_trainer, save_arms

from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, serve_in_thread
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl import make_rollout_func


def test_ten_steps_from_the_engines_episodes(tmp_path: Path) -> None:
    embedded = EmbeddedEngine(load_embedded_tokenizer(), ByTask(samples=2))
    with serve_in_thread(embedded) as engine:
        rollout = make_rollout_func(EpisodeSettings(env="desk"), engine=engine.url)
        seen: list[tuple[list[Any], dict[str, list[Any]]]] = []

        def recorded(prompts: list[Any], training: Any) -> dict[str, list[Any]]:
            seen.append((prompts, rollout(prompts, training)))
            return seen[-1][1]

        training = grpo_trainer(
            tmp_path, recorded, [str(at) for at in known_tasks()], max_steps=10,
            max_completion_length=384, learning_rate=1e-3, num_generations=2,
            per_device_train_batch_size=4,
        )  # fmt: skip
        training.train()
        rollout.close()
    logs = [entry for entry in training.state.log_history if "grad_norm" in entry]
    assert len(logs) == 10
    assert all(math.isfinite(entry["grad_norm"]) for entry in logs)
    spread = [entry["grad_norm"] > 0 for entry in logs if entry["reward_std"] > 0]
    assert len(spread) >= 3 and all(spread)
    # each prompt comes once per completion, groups together
    for prompts, output in seen:
        assert prompts == [prompts[0], prompts[0], prompts[2], prompts[2]]
        assert {len(values) for values in output.values()} == {4}


def test_the_mean_reward_of_a_two_armed_task_rises(tmp_path: Path) -> None:
    rollout = make_rollout_func(
        EpisodeSettings(env=save_arms(tmp_path), on_length="continue", verify="off"),
        engine=InProcess,
    )
    training = grpo_trainer(
        tmp_path, rollout, ["0"] * 16, max_steps=20, max_completion_length=1, learning_rate=2e-2,
        num_generations=16, per_device_train_batch_size=16, lr_scheduler_type="constant",
    )  # fmt: skip
    training.train()
    rollout.close()
    rewards = [entry["reward"] for entry in training.state.log_history if "reward" in entry]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.2, rewards


def test_the_example_is_what_trl_takes(tmp_path: Path) -> None:
    from trl.trainer.grpo_config import GRPOConfig

    example = run_path(str(Path(__file__).parents[2] / "examples" / "trl_desk" / "train.py"))
    config = GRPOConfig(
        **{**example["CONFIG"], "output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    )
    assert config.num_generations == 8
    assert [row["prompt"] for row in example["rows"]()] == [str(at) for at in range(33)]
    assert example["rollout_func"]().settings.env == "desk"
