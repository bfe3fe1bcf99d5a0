"""Train the network in three lessons: drills, imitation of reference episodes, and policy gradient.
An interrupted run continues from its last checkpoint.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from examples.learn_desk.batches import Sample, load_samples, save_samples, shuffled, to_batch
from examples.learn_desk.drills import drill_batches
from examples.learn_desk.initial import initialize
from examples.learn_desk.mistakes import Mistake, flaky_desk, forgetful_template
from examples.learn_desk.network import Network, Shape, save_network
from examples.learn_desk.play import play, play_references
from examples.learn_desk.reinforce import agreement, updates
from examples.learn_desk.tokenizer import (
    FILES,
    corpus,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

from toolroll import Episode
from toolroll.environments.desk import DESK
from toolroll.testing import load_engine

logger = logging.getLogger(__name__)

BATCH, DRILLS = 16, 20
"""The number of samples in one step of the imitation, and in one step of the drills."""

EVALUATED = 400
"""The number of held-out tasks in an evaluation. The network is evaluated before the first step,
after a third of the imitation, at its end, and after every ten steps of the policy gradient.
"""

CONTROL_SEED = 1
"""The controls start from the network of this seed, as it was after a third of the imitation. Its
mean reward on held-out tasks was 0.69.
"""


@dataclass(frozen=True)
class Lessons:
    """The number of steps of each lesson, and other settings.

    `rate` is the maximum learning rate of the drills and the imitation, and `last_rate` is the
    learning rate of the policy gradient. `references` is the number of tasks whose reference
    episodes are imitated. A step of the policy gradient plays `groups` tasks, each `group` times.
    """

    drills: int = 500
    imitation: int = 1600
    reinforcement: int = 20
    rate: float = 2e-3
    last_rate: float = 1e-4
    references: int = 6000
    groups: int = 32
    group: int = 8


class Learner:
    """One training run in a folder. The engine serves `model/`, and `log.jsonl` is the log.

    `state.pt` is written every 100 steps, and every 10 steps of the policy gradient. If this file
    exists, the run continues from it. With `control`, the run is only a policy gradient, with
    the mistake of this control if it has one. The run starts from the network after a third of the
    imitation, because that network can still improve much.
    """

    def __init__(
        self,
        out: Path,
        seed: int,
        lessons: Lessons,
        control: Mistake | None = None,
        *,
        evaluated: int = EVALUATED,
    ) -> None:
        self.out = out
        self.evaluated = evaluated
        self.lessons = lessons
        self.control = control
        self.seed = seed
        self.folder = out / f"seed-{seed}" if control is None else out / control.name
        self.model = self.folder / "model"
        torch.manual_seed(seed)
        self.network = Network(Shape())
        initialize(self.network)
        self.optimizer = self._optimizer(lessons.rate)
        self.reinforcing = self._optimizer(lessons.last_rate)
        self.step = 0
        self._began = time.monotonic()
        self._seconds = 0.0

    async def run(self) -> None:
        """Run the lessons, from the last checkpoint on if there is one."""
        self.model.mkdir(parents=True, exist_ok=True)
        for path in (self.out / "tokenizer").iterdir():
            (self.model / path.name).write_bytes(path.read_bytes())
        self.tokenizer = load_tokenizer(self.model)
        if (self.folder / "state.pt").exists():
            self._load()
        elif self.control is not None:
            start = torch.load(self.out / f"seed-{self.seed}" / "third.pt")
            self.network.load_state_dict(start)
            self.step = self._taught
        if self.step < self._taught:
            await self._teach()
        await self._reinforce()

    def _optimizer(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.network.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01
        )

    @property
    def _taught(self) -> int:
        return self.lessons.drills + self.lessons.imitation

    # --- drills and imitation: the likelihood of given tokens ------------------------------------

    async def _teach(self) -> None:
        if self.step == 0:
            await self._evaluate("untrained")
        batches = self._batches()
        while self.step < self._taught:
            loss = self._imitate(next(batches))
            if self.step % 50 == 0:
                lesson = "drills" if self.step <= self.lessons.drills else "imitation"
                self._log(lesson=lesson, loss=round(loss, 4))
            if self.step == self.lessons.drills + self.lessons.imitation // 3:
                write_state(self.network.state_dict(), self.folder / "third.pt")
                await self._evaluate("imitation")
            if self.step == self._taught:
                await self._evaluate("imitation")
            if self.step % 100 == 0 or self.step == self._taught:
                self._save()

    def _batches(self) -> Iterator[list[Sample]]:
        """Yield the remaining batches of drills, then batches of references."""
        rng = random.Random(f"{self.seed}/{self.step}")
        drills = drill_batches(self.tokenizer, DESK.tasks("train")[:3000], DRILLS, rng)
        while self.step < self.lessons.drills:
            yield next(drills)
        yield from shuffled(load_samples(self.out / "references.npz"), BATCH, rng)

    def _imitate(self, samples: Sequence[Sample]) -> float:
        warm = min(1.0, (self.step + 1) / 50)
        left = min(1.0, (self._taught - self.step) / (0.5 * self._taught))
        self.optimizer.param_groups[0]["lr"] = self.lessons.rate * warm * left
        batch = to_batch(samples)
        loss = -self.network.logprobs(batch.ids, batch.trained).mean()
        self.network.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    # --- policy gradient: the likelihood of what earned more than its group ----------------------

    async def _reinforce(self) -> None:
        last = self._taught + self.lessons.reinforcement
        save_network(self.network, self.model)
        version = f"{self.folder.name}/{self.step}"
        async with load_engine(self.model, weight_version=version, keep_log=False) as engine:
            while self.step < last:
                await self._step(engine.url)
                if (self.step - self._taught) % 10 == 0 or self.step == last:
                    await self._evaluate("reinforcement", engine.url)
                    self._save()

    async def _step(self, url: str) -> None:
        """Play a batch of groups, learn from it, and give the engine the new weights."""
        rng = random.Random(f"{self.seed}/{self.step}")
        tasks = rng.sample(DESK.tasks("train"), self.lessons.groups)
        mistake = self.control or Mistake("none")
        seed = 1000 * self.seed + self.step
        episodes = await play(
            url,
            self.tokenizer,
            tasks,
            samples=self.lessons.group,
            seed=seed,
            concurrency=self.lessons.groups * self.lessons.group,
            chat_template=forgetful_template() if mistake.forks else None,
            make_desk=flaky_desk if mistake.failures else None,
        )
        batch = mistake.batch(episodes, self.network, self.tokenizer)
        compared = agreement(self.network, [one.sample for one in batch]) if batch else None
        rng.shuffle(batch)
        norms = updates(self.network, self.reinforcing, batch)
        self.step += 1
        version = f"{self.folder.name}/{self.step}"
        await self._send_weights(url, version)
        self._log(
            lesson="reinforcement",
            reward=mean_reward(episodes),
            samples=len(batch),
            gradient=round(float(np.mean(norms)), 4) if norms else 0.0,
            agreement=asdict(compared) if compared else None,
            versions=sorted(set(_versions(episodes))),
        )

    async def _send_weights(self, url: str, version: str) -> None:
        save_network(self.network, self.model)
        body = {"model_path": str(self.model), "weight_version": version}
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(f"{url}/update_weights_from_disk", json=body) as response,
        ):
            await response.read()

    # --- evaluation, log and state ---------------------------------------------------------------

    async def _evaluate(self, lesson: str, url: str | None = None) -> None:
        """Play held-out tasks and log the mean reward. Without `url`, start an engine."""
        tasks = DESK.tasks("held-out")[: self.evaluated]
        if url is None:
            save_network(self.network, self.model)
            async with load_engine(self.model, keep_log=False) as engine:
                episodes = await play(engine.url, self.tokenizer, tasks)
        else:
            episodes = await play(url, self.tokenizer, tasks)
        self._log(lesson=lesson, held_out=mean_reward(episodes))

    def _log(self, **fields: Any) -> None:
        seconds = round(self._seconds + time.monotonic() - self._began, 1)
        line = {"step": self.step, "seconds": seconds, **fields}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        logger.info("%s %s", self.folder.name, line)

    def _save(self) -> None:
        state = {
            "step": self.step,
            "seconds": self._seconds + time.monotonic() - self._began,
            "network": self.network.state_dict(),
            "optimizers": [one.state_dict() for one in (self.optimizer, self.reinforcing)],
        }
        write_state(state, self.folder / "state.pt")

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt")
        self.network.load_state_dict(state["network"])
        for one, saved in zip((self.optimizer, self.reinforcing), state["optimizers"], strict=True):
            one.load_state_dict(saved)
        self.step, self._seconds = state["step"], state["seconds"]
        logger.info("%s continues at step %d", self.folder.name, self.step)


async def prepare(out: Path, lessons: Lessons) -> None:
    """Train the tokenizer, and play the reference episodes. Skip a step whose file exists."""
    if not (out / "tokenizer" / FILES[-1]).exists():
        save_tokenizer(train_tokenizer(corpus(DESK.tasks("train")[:3000])), out / "tokenizer")
    if not (out / "references.npz").exists():
        logger.info("play %d references", lessons.references)
        tasks = DESK.tasks("train")[: lessons.references]
        save_samples(await play_references(out / "tokenizer", tasks), out / "references.npz")


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint. If this is interrupted, the previous checkpoint stays valid."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)


def mean_reward(episodes: Sequence[Episode]) -> float:
    """Return the mean reward of the episodes that have one, or 0.0 if none has."""
    rewards = [one.result.reward for one in episodes if one.result.reward is not None]
    return round(float(np.mean(rewards)), 4) if rewards else 0.0


def _versions(episodes: Sequence[Episode]) -> Iterator[str]:
    for episode in episodes:
        for trajectory in episode.result.trajectories:
            yield from (span.version for span in trajectory.weight_versions)
