"""`python -m examples.learn_images`: imitate reference episodes briefly, then learn from rewards on
the real SGLang server. `make learn-images` sets what it needs. An interrupted run does the runs
that `results.jsonl` does not have yet.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.learn_desk.batches import Sample
from examples.learn_desk.learn import mean_reward
from examples.learn_desk.reinforce import with_advantages
from examples.learn_images.cards import ASK, CARDS
from examples.learn_images.model import VOCABULARY, Seen, load, logprobs, make_tokenizer
from examples.learn_images.play import play, play_script
from examples.learn_real.server import Server
from support.servers import sglang_server
from support.vision import image_tokens, save_random

from toolroll import Engine, EngineConfig, Episode, Task
from toolroll.rollout.template.images import ImageTokens
from toolroll.testing.reference_policy import play_references
from toolroll.trainers.sequences import image_inputs, training_sequences

OUT = Path("out/learn_images").absolute()
BEFORE = "(before)"
SEEDS, CONTROLS = (0, 1), ("none", "exchanged-images")
REFERENCES, IMITATION, UNSURE, BATCH, IMITATION_RATE, MISREAD = 1500, 650, 150, 32, 2e-3, 0.35
"""The imitation makes `IMITATION` steps, each with `BATCH` of the references. In the last `UNSURE`
steps, the teacher misreads a digit with the probability `MISREAD`: the model learns to read, but
not to trust what it reads.
"""
STEPS, GROUPS, GROUP, RATE = 10, 32, 4, 1e-3
"""A step plays `GROUPS` tasks, each `GROUP` times."""
EVALUATED = 200


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


def imitate(folder: Path) -> None:
    """Write a model that has imitated references to `folder`."""
    tasks = CARDS.tasks("train")[:REFERENCES]
    replies = play_references(CARDS, tasks, samples=1)
    roles = ["Tools: look(card) answer(digits)", "user\n", "assistant\n", "tool\n", "system\n"]
    source = Path(__file__).with_name("chat_template.jinja").read_text()
    scratch = folder.with_suffix(".new")
    make_tokenizer([*chain(*replies.values()), ASK, *roles], source).save_pretrained(scratch)
    save_random(scratch, "Qwen2VL", 0, vocab_size=VOCABULARY, initializer_range=0.02)
    tokenizer, model = load(scratch)
    images = image_tokens(tokenizer)
    episodes = asyncio.run(play_script(replies, tokenizer, tasks))
    samples = [one for episode in episodes for one in seen(episode, images)]
    numerals = tokenizer.convert_tokens_to_ids(list("0123456789"))
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=0.0), random.Random(0)
    for left in range(IMITATION, 0, -1):
        share = min(1.0, (IMITATION - left + 1) / 30, left / UNSURE)
        optimizer.param_groups[0]["lr"] = IMITATION_RATE * share
        batch = rng.sample(samples, BATCH)
        if left <= UNSURE:
            batch = [misread(one, numerals, rng) for one in batch]
        loss = -logprobs(model, batch)[0].mean()
        descend(model, optimizer, loss)
        if left % 50 == 0:
            print(f"imitation: {left} steps left, loss {loss:.4f}", flush=True)
    model.save_pretrained(scratch)
    scratch.rename(folder)


def misread(one: Seen, numerals: Sequence[int], rng: random.Random) -> Seen:
    """Return a reference whose answer may have other digits."""
    ids = one.sample.ids.copy()
    for place in np.flatnonzero(np.isin(ids, numerals))[-2:]:
        if rng.random() < MISREAD:
            ids[place] = rng.choice(numerals)
    return replace(one, sample=replace(one.sample, ids=ids))


def descend(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Make one step of the optimizer."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def scored(episodes: Sequence[Episode], images: ImageTokens) -> list[tuple[Seen, float]]:
    """Return the samples of all groups whose rewards differ, with their advantages."""
    return [
        (sample, advantage)
        for episode, advantage in with_advantages(episodes)
        for sample in seen(episode, images)
    ]


class Run:
    """A run of the policy gradient from the model in `start`, on `server`."""

    def __init__(self, start: Path, server: Server, control: str, seed: int) -> None:
        self._server, self._control, self._seed = server, control, seed
        self._tokenizer, self._model = load(start)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE, weight_decay=0.0)
        self._tokenizer.save_pretrained(OUT / "served")

    def play(self, tasks: Sequence[Task], version: str, samples: int = 1) -> list[Episode]:
        """Give the server the weights, and play."""
        self._model.save_pretrained(OUT / "served")
        self._server.load(OUT / "served", version)
        engine = Engine(EngineConfig(engine=self._server.url, vocab_size=len(self._tokenizer)))
        seed = random.Random(version).randrange(1 << 30)
        return asyncio.run(play(engine, self._tokenizer, tasks, samples=samples, seed=seed))

    def step(self, number: int) -> dict[str, Any]:
        """Play groups, and learn from them."""
        rng = random.Random(f"{self._seed}/{number}")
        tasks = rng.sample(CARDS.tasks("train"), GROUPS)
        episodes = self.play(tasks, f"{self._control}/{self._seed}/{number}", GROUP)
        batch, advantages = zip(*scored(episodes, image_tokens(self._tokenizer)), strict=True)
        exchange = rng if self._control == "exchanged-images" else None
        found, recorded, owner = logprobs(self._model, batch, exchange)
        # The control trusts its own logprobs: the recorded ones would show that images are wrong.
        ratio = (found - (found.detach() if exchange else recorded)).exp()
        descend(self._model, self._optimizer, -(ratio * torch.tensor(advantages)[owner]).mean())
        differences = (found.detach() - recorded).abs()
        return {
            "reward": mean_reward(episodes), "samples": len(batch),
            "difference": [float(f"{differences.quantile(at):.1e}") for at in (0.5, 0.99, 1.0)],
        }  # fmt: skip


def main() -> None:
    """Do the runs that the results do not have yet."""
    results = OUT / "results.jsonl"
    done = results.read_text() if results.exists() else ""
    start = OUT / "start"
    if not start.exists():
        imitate(start)
    with sglang_server(
        OUT, model=start, torchvision=Path(os.environ["TOOLROLL_TORCHVISION"]),
        environment={"SGLANG_VLM_CACHE_SIZE_MB": "0"},  # it would keep what earlier weights saw
    ) as started:  # fmt: skip
        server = Server(started.url, started.process, started.log)
        for seed, control in [(0, BEFORE), *product(SEEDS, CONTROLS)]:
            if f'"control": "{control}", "seed": {seed},' in done:
                continue
            run, steps = Run(start, server, control, seed), []
            for number in range(STEPS if control != BEFORE else 0):
                steps.append(run.step(number))
                print(control, seed, number, steps[-1], flush=True)
            reward = mean_reward(run.play(CARDS.tasks("held-out")[:EVALUATED], "held-out"))
            result = {"control": control, "seed": seed, "held_out": reward, "steps": steps}
            print(json.dumps(result), flush=True)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
