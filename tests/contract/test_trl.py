"""TRL's own `GRPOTrainer` trains on the CPU from our episodes."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

from support.trl_toy import InProcess, grpo_trainer, save_arms

from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl import make_rollout_func


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
