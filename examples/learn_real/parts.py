"""The parts of a run, in the order of their worth. Each leaves `result.json` in its folder. A part
with a result is not done again, and a part that was killed continues from its files.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from examples.learn_desk.batches import load_samples, samples_of, save_samples, shuffled
from examples.learn_desk.mistakes import MISTAKES
from examples.learn_desk.play import MAX_NEW_TOKENS, MAX_TURNS, OPTIONS, play
from examples.learn_desk.reinforce import agreement, updates
from examples.learn_real.learner import Learner, RealNetwork
from examples.learn_real.model import convert, package_file
from examples.learn_real.references import reference_sample
from examples.learn_real.server import sglang
from examples.learn_real.settings import Settings
from transformers import AutoTokenizer

from toolroll import ChatTemplate, Episode, Task, read_episodes
from toolroll.cli.app import app
from toolroll.cli.compare import compare_folders
from toolroll.environments.desk.generate import generate
from toolroll.evaluation.compare import Question
from toolroll.rollout.runs.episode_file import FILE_NAME
from toolroll.trainers.sequences import delivered_share, select_sequences

ENDS = {
    "start": 1.0,
    "untrained": 1.0,
    "warm": 0.5,
    "rl": 0.67,
    "shifted-mask": 0.84,
    "tokens-from-text": 1.0,
}
"""The parts, and the share of the time that is over when the training of each must end. The last
three start from the model after the warm start. The last two are `rl` with a mistake of
`learn_desk`.
"""


class Run:
    """A run in the folder `out`. `gguf` are the model's file, or its pieces (default: the file of
    the installed package).
    """

    def __init__(self, out: Path, settings: Settings, gguf: Sequence[Path] | None = None) -> None:
        self.out, self.settings, self.base = out, settings, out / "base"
        self._began = time.monotonic()
        torch.set_float32_matmul_precision("high" if settings.device == "cuda" else "highest")
        if not self.base.exists():
            convert(gguf or [package_file()], out / "base.new", settings.layers)
            (out / "base.new").rename(self.base)
        self._tokenizer = AutoTokenizer.from_pretrained(self.base)
        rows = generate(settings.references, held_out=False)
        self._tasks = [Task(row["id"], at, "train", row) for at, row in enumerate(rows)]

    def run(self, flags: Sequence[str] = ()) -> None:
        """Start a server, and do the parts that have no result, until the time is over. `flags` are
        SGLang's.
        """
        with sglang(self.base, self.settings.device, self.out / "sglang.log", flags) as server:
            if not (self.out / "references.npz").exists():  # while the server starts
                template = ChatTemplate(self._tokenizer)
                found = [asyncio.run(reference_sample(template, task)) for task in self._tasks]
                save_samples(found, self.out / "references.npz")
            server.wait()
            self._server = server
            for name in [name for name in ENDS if not self.result(name)]:
                began, folder = time.monotonic(), self.out / name
                if self._left(name) <= 0:
                    sys.exit(f"no time is left for {name}: the same command continues there")
                folder.mkdir(exist_ok=True)
                result = self._part(name, folder) | {"part_seconds": time.monotonic() - began}
                (folder / "new.json").write_text(json.dumps(result, indent=2) + "\n")
                (folder / "new.json").rename(folder / "result.json")
                print(name, json.dumps(result), flush=True)

    def result(self, name: str) -> dict[str, Any]:
        """Return the result of a part, or an empty dictionary if it is not done."""
        path = self.out / name / "result.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _left(self, name: str) -> float:
        """Return the seconds that are left for training in a part. Its evaluation will take about
        as long as that of the untrained model.
        """
        evaluation = self.result("untrained").get("part_seconds", 0.0)
        end = self._began + 60 * self.settings.minutes * ENDS[name]
        return float(end - evaluation - time.monotonic())

    def _part(self, name: str, folder: Path) -> dict[str, Any]:
        settings = self.settings
        if name == "start":
            facts = {name: version(name) for name in ("torch", "transformers", "sglang")}
            facts["gpu"] = torch.cuda.get_device_name() if settings.device == "cuda" else "none"
            return {"settings": asdict(settings), "seconds": time.monotonic() - self._began} | facts
        if name == "untrained":
            return self._evaluate(folder, RealNetwork(self.base, settings.device))
        warm = self.out / "warm" / "model"
        start, rate = (self.base, settings.rate) if name == "warm" else (warm, settings.rl_rate)
        learner = Learner(folder, start, settings.device, rate)
        if not (folder / "model").exists():  # otherwise, only its evaluation was interrupted
            (self._imitate if name == "warm" else self._reinforce)(learner)
            learner.save()
        learner.network.llama.save_pretrained(folder / "model")
        self._tokenizer.save_pretrained(folder / "model")
        with learner.timed("evaluation"):
            found = self._evaluate(folder, learner.network)
        return found | learner.report()

    # --- training --------------------------------------------------------------------------------

    def _imitate(self, learner: Learner) -> None:
        """Imitate the references. The learning rate rises for 20 steps, and falls to 0 in the
        second half of the time.
        """
        settings = self.settings
        samples = load_samples(self.out / "references.npz")
        batches = shuffled(samples, settings.batch, random.Random(learner.step))
        while learner.step < settings.warm_steps and (left := self._left("warm")) > 0:
            future = left / (learner.seconds["training"] + left)  # the share of the time
            rate = settings.rate * min(1.0, (learner.step + 1) / 20, 2 * future)
            learner.log(loss=learner.imitate(next(batches), rate))
            learner.save(after=settings.save_every)

    def _reinforce(self, learner: Learner) -> None:
        """Play groups, learn from them, and give the server the new weights. A control makes at
        most as many steps as `rl`.
        """
        settings, network, name = self.settings, learner.network, learner.folder.name
        network.llama.gradient_checkpointing_enable()  # the batches are large
        mistake = MISTAKES["none" if name == "rl" else name]
        limit = self.result("rl").get("steps", settings.rl_steps)
        self._send(network, f"{name}/{learner.step}")
        while learner.step < limit and self._left(name) > 0:
            rng, url = random.Random(learner.step), self._server.url
            tasks, seed = rng.sample(self._tasks, settings.groups), 1000 + learner.step
            with learner.timed("playing"):
                playing = play(url, self._tokenizer, tasks, samples=settings.group, seed=seed)
                episodes = asyncio.run(playing)
            with learner.timed("training"):
                measured = _measured(episodes, network)
                batch = mistake.batch(episodes, network, self._tokenizer)
                rng.shuffle(batch)
                norms = updates(network, learner.optimizer, batch)
            learner.step += 1
            learner.tokens += sum(len(one.sample.ids) for one in batch)
            with learner.timed("weights"):
                self._send(network, f"{name}/{learner.step}")
            learner.log(samples=len(batch), gradients=norms, **measured)
            learner.save(after=settings.save_every)

    def _send(self, network: RealNetwork, label: str) -> None:
        network.llama.save_pretrained(self.out / "served")
        self._server.load(self.out / "served", label)

    # --- evaluation ------------------------------------------------------------------------------

    def _evaluate(self, folder: Path, network: RealNetwork) -> dict[str, Any]:
        """Play held-out tasks with `toolroll run`. If this was interrupted, it plays only the
        missing episodes. Compare them with those of the earlier parts, as `toolroll compare` does.
        """
        self._send(network, folder.name)
        out, last = folder / "episodes", self.settings.held_out - 1
        before = len(list(read_episodes(out))) if (out / FILE_NAME).exists() else 0
        command = (
            f"run desk --split held-out --tasks 0-{last} --no-do-nothing "
            f"--engine {self._server.url} --parser hermes --max-turns {MAX_TURNS} "
            f"--max-new-tokens {MAX_NEW_TOKENS}"
        ).split()
        command += ["--env-args", json.dumps(OPTIONS.settings), "--model", str(self.base)]
        began = time.monotonic()
        app([*command, "--out", str(out)], standalone_mode=False)
        seconds = time.monotonic() - began
        episodes = list(read_episodes(out))
        if len(episodes) <= last:  # after Ctrl-C
            sys.exit(f"{out} is not complete: the same command continues there")
        speed = sum(one.result.metrics["completion_tokens"] for one in episodes[before:]) / seconds
        found = _measured(episodes, network) | {"sampled_per_second": speed, "compared_with": {}}
        for other in filter(self.result, ("untrained", "warm", "rl")):
            [comparison], _ = compare_folders([self.out / other / "episodes", out], Question())
            found["compared_with"][other] = comparison["reward"]
        return found


def _measured(episodes: Sequence[Episode], network: RealNetwork) -> dict[str, Any]:
    """Return the mean reward, the share of the sampled tokens that a trainer gets, and how the
    trainer's logprobs differ from the engine's in at most 64 sequences.
    """
    results = [episode.result for episode in episodes]
    rewards = [result.reward for result in results if result.reward is not None]
    sequences = [one for result in results for one in select_sequences(result, several=True)]
    samples = [sample for result in results for sample in samples_of(result)][:64]
    return {
        "reward": fmean(rewards) if rewards else None,
        "aborted": len(results) - len(rewards),
        "delivered_share": delivered_share(sequences),
        "logprobs": asdict(agreement(network, samples)) if samples else None,
    }
