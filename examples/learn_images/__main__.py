"""`python -m examples.learn_images`: imitate reference episodes briefly, then learn from rewards on
the real SGLang server. `make learn-images` sets what it needs. An interrupted run does the runs
that `results.jsonl` does not have yet.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.learn_desk.batches import Sample
from examples.learn_desk.learn import mean_reward
from examples.learn_images.cards import ASK, CARDS
from examples.learn_images.model import Seen, load, logprobs, make_tokenizer, save_random
from examples.learn_images.play import play, play_script
from examples.learn_real.server import Server
from support.servers import sglang_server
from support.vision import image_tokens

from toolroll import Episode, Task
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.template.images import ImageTokens
from toolroll.testing.reference_policy import play_references
from toolroll.trainers.advantages import group_advantages
from toolroll.trainers.sequences import image_inputs, training_sequences

OUT = Path("out/learn_images")
SEEDS, CONTROLS = (0, 1), ("none", "exchanged-images")
BATCH, IMITATION_RATE, ENOUGH = 32, 2e-3, 0.4
"""The imitation ends as soon as the model gives the references of other tasks the mean probability
`ENOUGH`, which is the reward that it would earn.
"""
STEPS, GROUPS, GROUP, RATE, CLIP = 12, 32, 4, 1e-3, 0.2
"""A step plays `GROUPS` tasks, each `GROUP` times."""
EVALUATED = 200
PATCHES = 16
"""The rows of an image in the processor's `pixel_values`."""


def seen(episode: Episode, images: ImageTokens) -> list[Seen]:
    """Return the trained sequences of an episode."""
    return [
        Seen(
            Sample(
                np.array(one.prompt_ids + one.response_ids, np.int32),
                np.array([0] * len(one.prompt_ids) + one.loss_mask, np.int32),
                np.array([0.0] * len(one.prompt_ids) + one.logprobs, np.float32),
            ),
            image_inputs(one, images),
        )
        for one in training_sequences(episode.result, images=True)
        if one.trained_tokens
    ]


def imitate(folder: Path, seed: int) -> None:
    """Write a model that has imitated some references to `folder`."""
    tasks, others = CARDS.tasks("references"), CARDS.tasks("train")[-64:]
    replies = play_references(CARDS, [*tasks, *others], samples=1)
    roles = ["Tools: look(card) answer(digits)", "user\n", "assistant\n", "tool\n", "system\n"]
    source = Path(__file__).with_name("chat_template.jinja").read_text()
    scratch = folder.with_suffix(".new")
    save_random(make_tokenizer([*chain(*replies.values()), ASK, *roles], source), scratch, seed)
    tokenizer, model = load(scratch)
    images = image_tokens(tokenizer)
    episodes = asyncio.run(play_script(replies, tokenizer, [*tasks, *others]))
    assert mean_reward(episodes) == 1.0
    by_split = defaultdict(list)
    for episode in episodes:
        by_split[episode.task_id.rpartition("-")[0]] += seen(episode, images)
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=0.0), random.Random(seed)
    for step in range(1001):
        optimizer.param_groups[0]["lr"] = IMITATION_RATE * min(1.0, (step + 1) / 30)
        found = logprobs(model, rng.sample(by_split["references"], BATCH))[0]
        descend(model, optimizer, -found.mean())
        if step % 20 == 0:
            with torch.no_grad():
                each, _, owner = logprobs(model, by_split["train"])
            reward = float(torch.zeros(64).index_add(0, owner, each).exp().mean())
            print(f"imitation {step}: {reward:.3f}", flush=True)
            if reward >= ENOUGH:
                break
    model.save_pretrained(scratch)
    scratch.rename(folder)


def descend(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Make one step of the optimizer."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def scored(episodes: Sequence[Episode], images: ImageTokens) -> tuple[list[Seen], list[float]]:
    """Return the samples of all groups whose rewards differ, and their advantages."""
    groups: defaultdict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.task_id].append(episode)
    found = [
        (one, advantage)
        for group in groups.values()
        for episode, advantage in zip(
            group, group_advantages([each.result for each in group]), strict=True
        )
        if advantage
        for one in seen(episode, images)
    ]
    return [one for one, _ in found], [advantage for _, advantage in found]


def exchanged(batch: Sequence[Seen], rng: random.Random) -> list[Seen]:
    """Return the samples, each with images of others."""
    with_images = [one for one in batch if one.images]
    rows = [row for one in with_images for row in one.images["pixel_values"].split(PATCHES)]
    rng.shuffle(rows)
    left = iter(rows)
    return [
        replace(one, images={**one.images, "pixel_values": torch.cat(
            [next(left) for _ in one.images["image_grid_thw"]]
        )}) if one.images else one
        for one in batch
    ]  # fmt: skip


class Run:
    """A run of the policy gradient from the model in `start`, on `server`."""

    def __init__(self, start: Path, server: Server, control: str, seed: int) -> None:
        self._server, self._control, self._seed = server, control, seed
        self._tokenizer, self._model = load(start)
        self._images = image_tokens(self._tokenizer)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE, weight_decay=0.0)
        self._served = OUT / "served"
        self._tokenizer.save_pretrained(self._served)

    def play(self, tasks: Sequence[Task], version: str, samples: int = 1) -> list[Episode]:
        """Give the server the weights, and play."""
        self._model.save_pretrained(self._served)
        self._server.load(self._served, version)
        engine = Engine(EngineConfig(engine=self._server.url, vocab_size=len(self._tokenizer)))
        seed = random.Random(version).randrange(1 << 30)
        return asyncio.run(play(engine, self._tokenizer, tasks, samples=samples, seed=seed))

    def held_out(self, version: str) -> float:
        """Return the mean reward on held-out tasks."""
        return mean_reward(self.play(CARDS.tasks("held-out")[:EVALUATED], version))

    def step(self, number: int) -> dict[str, Any]:
        """Play groups, and learn from them."""
        rng = random.Random(f"{self._seed}/{number}")
        tasks = rng.sample(CARDS.tasks("train"), GROUPS)
        episodes = self.play(tasks, f"{self._control}/{self._seed}/{number}", GROUP)
        batch, advantages = scored(episodes, self._images)
        right = self._control == "none"
        batch = batch if right else exchanged(batch, rng)
        found, recorded, owner = logprobs(self._model, batch)
        # The control trusts its own logprobs: the recorded ones would show that images are wrong.
        ratio = (found - (recorded if right else found.detach())).exp()
        weights = torch.tensor(advantages)[owner]
        loss = -torch.minimum(ratio * weights, ratio.clamp(1 - CLIP, 1 + CLIP) * weights).mean()
        descend(self._model, self._optimizer, loss)
        differences = (found.detach() - recorded).abs()
        return {
            "reward": mean_reward(episodes), "samples": len(batch),
            "difference": [float(f"{differences.quantile(at):.1e}") for at in (0.5, 0.99, 1.0)],
        }  # fmt: skip


def main() -> None:
    """Do the runs that the results do not have yet."""
    OUT.mkdir(parents=True, exist_ok=True)
    results = OUT / "results.jsonl"
    done = results.read_text() if results.exists() else ""
    starts = [OUT / f"start-{seed}" for seed in SEEDS]
    for seed, start in enumerate(starts):
        if not start.exists():
            imitate(start, seed)
    torchvision = Path(os.environ["TOOLROLL_TORCHVISION"])
    with sglang_server(
        OUT.absolute(), model=starts[0].absolute(), torchvision=torchvision, name="sglang",
        environment={"SGLANG_VLM_CACHE_SIZE_MB": os.environ.get("CACHE_MB", "0")},
    ) as started:  # fmt: skip
        server = Server(started.url, started.process, started.log)
        for seed, control in product(SEEDS, CONTROLS):
            if f'"control": "{control}", "seed": {seed},' in done:
                continue
            run = Run(starts[seed], server, control, seed)
            before, steps = run.held_out("before"), []
            for number in range(STEPS):
                steps.append(run.step(number))
                print(control, seed, number, steps[-1], flush=True)
            result = {"control": control, "seed": seed, "before": before}
            result |= {"after": run.held_out("after"), "steps": steps}
            print(json.dumps(result), flush=True)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
