"""One training step by hand, out of the episode file alone, for the tests of the trainers' losses.

`play_group` writes the file, with the embedded engine: two tasks with three episodes each, among
them a forked one in both, and an aborted one. The policy is a tiny Llama network. The engine's
logprobs are the network's, moved by up to 0.3, so that ratios are not 1 and some are clipped.

Invariant: `read` and all that follows it use no code of the project.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.episodes import agent, serving
from support.qwen import tokenizer_for, trl_template
from support.scripted_runs import ScriptedFactory
from support.tiny_llama import write_model

from toolroll.rollout.environment import Action, Environment, Observation, StepResult, Task
from toolroll.rollout.episode import Episode
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.episode_file import EpisodeStore
from toolroll.rollout.runs.runner import Runner, session_id
from toolroll.rollout.settings import RunSettings
from toolroll.testing import (
    EmbeddedEngine,
    Fault,
    PolicyRequest,
    reference_logprobs,
    scripted_source,
)

CLIP = 0.2
MAX_NEW_TOKENS = 64
SAMPLES = 3
PLAYED = (0, 1)
"""The tasks."""
THINKS = ((0, 2), (1, 0))
"""The episodes with thoughts, which the template removes, so that they fork."""
GIVES_UP = ((0, 1), (1, 1))
ABORTED = (1, 2)


# --- the run --------------------------------------------------------------------------------------


def policy_of(folder: Path) -> Any:
    """The network, in float64: in float32, a padded and a whole sequence are 2e-4 apart."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def logprobs_of(policy: Any, ids: Sequence[int]) -> Any:
    """The logprob of each token of a sequence but the first, [n - 1]."""
    import torch

    row = torch.tensor(ids)
    logits = policy(row[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]


def padded_logps(policy: Any, ids: Any, mask: Any) -> Any:
    """The logprob of each token but the first of padded sequences, [rows, n - 1]."""
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    logits = policy(ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


LINES = ("Let me see what there is.", "It is the second one, I think.", "All right: it is done.")


class Talk(Environment):
    """Three turns without tools, or until the model says goodbye."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": f"Please begin with {task.index}."}])

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        done = self.turns == len(LINES) or "Goodbye" in action.content
        more: list[Any] = [] if done else [{"role": "user", "content": "Go on."}]
        return StepResult(more, reward=float("All right" in action.content), done=done)


TALK = ScriptedFactory(Talk, count=len(PLAYED))
TASKS = TALK.tasks("test")


async def talk(task: int, create: Any, **given: Any) -> float:
    """Play the run's environment with another program's chat completions, and return the reward."""
    environment = Talk()
    messages: list[Any] = list(environment.reset(TASKS[task], 0).messages)
    while True:
        reply = await create(messages=messages, **given)
        message = reply.choices[0].message.model_dump(exclude_none=True)
        result = environment.step(Action(message["content"]))
        if result.done:
            return float(result.reward or 0.0)
        messages += [message, *result.messages]


def turn_of(request: PolicyRequest) -> int:
    return request.text.count("<|im_start|>assistant") - 1


@dataclass
class Script:
    """The replies by (task, sample). `playing` says which episode is played if the session's name
    does not. The episode `rambles` says more than a turn may have.
    """

    playing: tuple[int, int] | None = None
    rambles: tuple[int, int] | None = None
    keys: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {
            session_id(TALK.name, TASKS[task].id, sample): (task, sample)
            for task in PLAYED
            for sample in range(SAMPLES)
        }
    )

    def key(self, request: PolicyRequest) -> tuple[int, int]:
        return self.playing or self.keys[request.routing_key]

    def reply(self, request: PolicyRequest) -> str:
        key = self.key(request)
        if key == self.rambles:
            return "And then? " * MAX_NEW_TOKENS
        line = "No. Goodbye." if key in GIVES_UP else LINES[turn_of(request)]
        return f"<think>\nHm.\n</think>\n\n{line}" if key in THINKS else line

    def fault(self, request: PolicyRequest) -> Fault | None:
        aborts = self.key(request) == ABORTED and turn_of(request) == 1
        return Fault(status=400) if aborts else None


@dataclass(frozen=True)
class World:
    """`folder` has the network and its tokenizer, `file` the episodes."""

    folder: Path
    tokenizer: Any
    file: Path
    episodes: list[Episode]

    def group(self, task: int) -> list[Any]:
        """The results of a task's episodes, by sample."""
        ours = [episode for episode in self.episodes if episode.task_index == task]
        return [one.result for one in sorted(ours, key=lambda one: one.sample)]

    def policy(self) -> Any:
        return policy_of(self.folder)

    @property
    def played(self) -> list[list[Played]]:
        """The episodes of the file, by task."""
        episodes = read(self.file)
        return [[each for each in episodes if each.task == task] for task in PLAYED]

    @property
    def trained(self) -> int:
        return sum(episode.tokens for group in self.played for episode in group)

    def check(self, gradient: dict[str, Any], losses: Iterable[tuple[Row, Loss]]) -> None:
        """Assert that a gradient is that of the step by hand, to 1e-5 of the largest."""
        expected = step(self.policy(), losses)
        assert gradient.keys() == expected.keys()
        largest = max(float(values.abs().max()) for values in expected.values())
        assert largest > 0
        for name, values in expected.items():
            apart = float((gradient[name] - values).abs().max()) / largest
            assert apart <= 1e-5, f"{name}: {apart:.2g} of the largest gradient"


@asynccontextmanager
async def engine_of(folder: Path, script: Script) -> AsyncIterator[tuple[EmbeddedEngine, Model]]:
    """The engine, with the network's logprobs."""
    import torch

    policy = policy_of(folder)

    def logprobs(prefix: Any, ids: Iterable[int]) -> list[float]:
        ids = list(ids)
        if not ids:
            return []
        with torch.no_grad():
            own = logprobs_of(policy, [*map(int, prefix), *ids])[-len(ids) :].tolist()
        moves = [0.075 * (one + 4.0) for one in reference_logprobs(prefix, ids)]
        return [float(torch.tensor(a + b)) for a, b in zip(own, moves, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted_source, "reference_logprobs", logprobs)
        tokenizer = tokenizer_for(trl_template("qwen3"))
        async with serving(
            tokenizer, script.reply, faults=script.fault, weight_version="1"
        ) as served:
            yield served


async def play_group(folder: Path, *, rambles: tuple[int, int] | None = None) -> World:
    """Play the episodes, and write them to `folder`. The episode `rambles` is truncated."""
    tokenizer: Any = tokenizer_for(trl_template("qwen3"))
    tokenizer.save_pretrained(folder)
    write_model(folder, max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id)
    episodes: list[Episode] = []
    async with engine_of(folder, Script(rambles=rambles)) as (_, model):
        settings = RunSettings(
            samples=SAMPLES, reruns=0, concurrency=1, pace_gc=False,
            sampling_params={"max_new_tokens": MAX_NEW_TOKENS},
        )  # fmt: skip
        runner = Runner(TALK, lambda: agent(model), settings)
        with EpisodeStore(folder, sync="end") as store:

            def keep(episode: Episode) -> None:
                episodes.append(episode)
                store.append(episode)

            await runner.run(TASKS, keep)
    return World(folder, tokenizer, folder / "episodes.jsonl", episodes)


# --- the step by hand -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One sequence of an episode, as the file has it."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float | None]

    @property
    def trained(self) -> list[int]:
        return [at for at, one in enumerate(self.mask) if one]


@dataclass(frozen=True)
class Played:
    task: int
    sample: int
    reward: float | None
    rows: list[Row]

    @property
    def most(self) -> Row:
        """The sequence with the most trained tokens."""
        return max(self.rows, key=lambda row: len(row.trained))

    @property
    def tokens(self) -> int:
        return sum(len(row.trained) for row in self.rows)


def read(file: Path) -> list[Played]:
    """The episodes, by task and sample. What an aborted one sampled is not trained."""
    found = []
    for line in map(json.loads, file.read_text().splitlines()):
        trained = line["reward"] is not None
        rows = [
            Row(one["input_ids"], [mask * trained for mask in one["loss_mask"]], one["logprobs"])
            for one in line["trajectories"]
        ]
        found.append(Played(line["task_index"], line["sample"], line["reward"], rows))
    return sorted(found, key=lambda one: (one.task, one.sample))


def clipped(logps: Any, old: Any, advantage: float) -> Any:
    """PPO's loss of each token."""
    import torch

    ratio = (logps - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def normalized(group: Sequence[Played], *, eps: float, ddof: int = 1) -> list[float]:
    """GRPO's advantages. An episode without a reward is in no mean, and gets 0."""
    rewards = [one.reward for one in group if one.reward is not None]
    mean, deviation = np.mean(rewards), np.std(rewards, ddof=ddof)
    return [
        0.0 if one.reward is None else float((one.reward - mean) / (deviation + eps))
        for one in group
    ]


Loss = Callable[[Any, Any], Any]
"""The loss of a sequence, out of its trained tokens' logprobs: the policy's and the engine's."""


def per_token(tokens: int) -> Callable[[float], Loss]:
    """PPO's loss by advantage, as a mean over `tokens`. The engine's logprobs are the old ones."""
    return lambda advantage: lambda logps, old: clipped(logps, old, advantage).sum() / tokens


def weighted(tokens: int, most: float, least: float | None = None) -> Callable[[float], Loss]:
    """As `per_token`, with truncated importance sampling: the old logprobs are the policy's."""

    def loss_of(advantage: float) -> Loss:
        def loss(logps: Any, rollout: Any) -> Any:
            weight = (logps.detach() - rollout).exp().clamp(least, most)
            return (clipped(logps, logps.detach(), advantage) * weight).sum() / tokens

        return loss

    return loss_of


def terms(
    groups: Iterable[Sequence[Played]],
    loss_of: Callable[[float], Loss],
    *,
    most: bool = False,
    **normal: Any,
) -> list[tuple[Row, Loss]]:
    """Each sequence with its loss. `most`: one of each episode; `normal`: see `normalized`."""
    return [
        (row, loss_of(advantage))
        for group in groups
        for one, advantage in zip(group, normalized(group, **normal), strict=True)
        for row in ([one.most] if most else one.rows)
    ]


def step(policy: Any, terms: Iterable[tuple[Row, Loss]]) -> dict[str, Any]:
    """The gradient of the sum of the terms, by the parameters' names."""
    import torch

    policy.zero_grad()
    for row, loss in terms:
        if row.trained:
            logps = logprobs_of(policy, row.ids)[torch.tensor(row.trained) - 1]
            rollout = torch.tensor([row.logprobs[at] for at in row.trained])
            loss(logps, rollout).backward()
    return gradient(policy)


def gradient(policy: Any) -> dict[str, Any]:
    """What the backward pass left, and nothing afterwards."""
    found = {name: one.grad.clone() for name, one in policy.named_parameters()}
    policy.zero_grad()
    return found
