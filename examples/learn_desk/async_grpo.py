"""`python -m examples.learn_desk.async_grpo`: train a weaker network with TRL's `AsyncGRPOTrainer`
on a CPU, with the right loss mask and with wrong ones. `make learn-trl` sets what it needs.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.learn_desk.batches import Sample
from examples.learn_desk.learn import EVALUATED, mean_reward
from examples.learn_desk.mistakes import MISTAKES, Mistake, own_logprobs
from examples.learn_desk.network import Network, load_network, save_network, with_noise
from examples.learn_desk.play import MAX_NEW_TOKENS, MAX_TURNS, OPTIONS, play
from examples.learn_desk.tokenizer import FILES, load_tokenizer
from support.async_grpo import config_of, desk_engine, on_a_cpu, trainer_of

from toolroll.environments.desk import DESK
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.testing import load_engine
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl.rows import Row

CONTROLS = ("none", "mask-inverted", "mask-everywhere", "shifted-mask")
SEEDS = (0, 1)
STEPS, GROUPS, GROUP, ROWS, RATE = 12, 8, 8, 32, 2e-4
"""A step trains `GROUPS` tasks of the split `train`, each played `GROUP` times, in micro-batches of
`ROWS` rows. `RATE` is the learning rate.
"""
SETTINGS = EpisodeSettings(
    env="desk", env_args=dict(OPTIONS.settings), split="train", max_turns=MAX_TURNS, verify="off"
)


def change(row: Row, mistake: Mistake, network: Network) -> None:
    """Make the mistake in a row, if it has one, with the logprobs that `network` computes."""
    if mistake.change is not None:
        ids, mask = row.input_ids.astype(np.int32), row.completion_mask.astype(np.int32)
        sample = mistake.change(Sample(ids, mask, row.old_log_probs), None)
        row.completion_mask = sample.loss_mask.astype(np.int64)
        row.old_log_probs = own_logprobs(sample, network).logprobs


def train(model: Path, folder: Path, control: str, seed: int) -> list[float]:
    """Train the network in `model`. Return the mean reward of the episodes of each step. `folder`
    then has `weights/`.
    """
    tasks = random.Random(seed).sample(range(len(DESK.tasks("train"))), STEPS * GROUPS)
    prompts = [str(index) for index in tasks]
    with on_a_cpu(), desk_engine(folder, model=model) as server:
        config = config_of(
            folder, server.url, seed=seed, max_steps=STEPS, max_staleness=1, num_generations=GROUP,
            per_device_train_batch_size=ROWS, gradient_accumulation_steps=GROUPS * GROUP // ROWS,
            max_completion_length=MAX_NEW_TOKENS, temperature=1.0, learning_rate=RATE,
            logging_steps=1, heartbeat_stale_after_s=3600.0,
        )  # fmt: skip
        trainer = trainer_of(folder, config, prompts, model=model, settings=SETTINGS)
        take, network = trainer.rollout_queue.get, load_network(model)

        def get(**named: Any) -> Row:
            row: Row = take(**named)
            network.load_state_dict(trainer.model.state_dict(), strict=False)  # + lm_head
            change(row, MISTAKES[control], network)
            return row

        trainer.rollout_queue.get = get
        trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


async def held_out(model: Path) -> float:
    """Return the mean reward on held-out tasks."""
    tokenizer = load_tokenizer(model)
    async with load_engine(model, keep_log=False) as engine:
        tasks = DESK.tasks("held-out")[:EVALUATED]
        return mean_reward(await play(engine.url, tokenizer, tasks))


def new_folder(folder: Path) -> Path:
    """Return a new folder with the tokenizer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(desk_model_path() / name, folder / name)
    return folder


def main(out: Path) -> None:
    """Do the runs that `out/results.jsonl` does not have yet."""
    results = out / "results.jsonl"
    done = results.read_text() if results.exists() else ""

    def write(**result: Any) -> None:
        with results.open("a", encoding="utf-8") as file:
            print(line := json.dumps(result), flush=True)
            file.write(line + "\n")

    weaker = out / "weaker"
    if not done:
        network = with_noise(load_network(desk_model_path()))
        save_network(network, new_folder(weaker))
        write(control="(before)", held_out=asyncio.run(held_out(weaker)))
    for seed, control in product(SEEDS, CONTROLS):
        if f'"{control}", "seed": {seed},' in done:
            continue
        folder = out / f"{control}-{seed}"
        new_folder(folder / "weights")
        rewards = train(weaker, folder, control, seed)
        reward = asyncio.run(held_out(folder / "weights"))
        write(control=control, seed=seed, held_out=reward, rewards=rewards)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path("out/async_grpo"))
