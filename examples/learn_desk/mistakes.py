"""Negative controls: the effect of a wrong mask, wrong tokens or a wrong reward.

The controls `none`, `failures` and `forks` contain no mistake. Each other control is like one of
these three, with one mistake that is found in real rollout code. If a mistake changes the tokens or
the mask, the trainer's logprobs replace the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.learn_desk.batches import Sample, to_batch
from examples.learn_desk.network import Policy
from examples.learn_desk.reinforce import Scored, scored

from toolroll import (
    Action,
    EnvironmentOptions,
    Episode,
    InteractionResult,
    Observation,
    Status,
    StepResult,
    Task,
)
from toolroll.environments.desk import BRIEF_POLICY, Desk

Change = Callable[[Sample, Any], Sample]


def _shifted(sample: Sample, _: Any) -> Sample:
    mask = np.roll(sample.loss_mask, 1)
    mask[0] = 0
    return replace(sample, loss_mask=mask)


def _everywhere(sample: Sample, _: Any) -> Sample:
    mask = np.ones_like(sample.loss_mask)
    mask[0] = 0
    return replace(sample, loss_mask=mask)


def _inverted(sample: Sample, _: Any) -> Sample:
    mask = 1 - sample.loss_mask
    mask[0] = 0
    return replace(sample, loss_mask=mask)


def _from_text(sample: Sample, tokenizer: Any) -> Sample:
    """Decode each span of tokens with the same mask, and encode its text again. Rollout loops that
    store messages do this.
    """
    ids: list[int] = []
    mask: list[int] = []
    cuts = np.flatnonzero(np.diff(sample.loss_mask)) + 1
    for part, flags in zip(
        np.split(sample.ids, cuts), np.split(sample.loss_mask, cuts), strict=True
    ):
        encoded = tokenizer.encode(tokenizer.decode(part), add_special_tokens=False)
        ids += encoded
        mask += [int(flags[0])] * len(encoded)
    return Sample(np.array(ids, np.int32), np.array(mask, np.int32), np.zeros(len(ids), np.float32))


@dataclass(frozen=True)
class Mistake:
    """One control. `change` alters each sample. The other fields alter how episodes are played, or
    which samples are made from them.
    """

    name: str
    change: Change | None = None
    failures: bool = False
    failures_graded: bool = False
    forks: bool = False
    forks_trained_twice: bool = False

    def batch(self, episodes: Sequence[Episode], network: Policy, tokenizer: Any) -> list[Scored]:
        """Return the samples of the episodes, with the mistake."""
        if self.failures_graded:
            for episode in episodes:
                _grade(episode.result)
        if self.forks_trained_twice:
            for episode in episodes:
                _train_context(episode.result)
        found = scored(episodes)
        if self.change is not None:
            found = [replace(one, sample=self.change(one.sample, tokenizer)) for one in found]
        if self.change is not None or self.forks_trained_twice:
            found = [replace(one, sample=own_logprobs(one.sample, network)) for one in found]
        return found


def _grade(result: InteractionResult) -> None:
    """Treat an aborted episode as completed with reward 0."""
    if result.status is Status.ABORTED:
        result.status, result.reward = Status.COMPLETED, 0.0


def _train_context(result: InteractionResult) -> None:
    """Train all turns of each sequence, including those that an earlier sequence already trains."""
    changed = []
    for trajectory in result.trajectories:
        mask = trajectory.loss_mask.copy()
        for turn in trajectory.turns:
            mask[turn.start : turn.stop] = 1
        start = min((turn.start for turn in trajectory.turns), default=trajectory.prompt_length)
        changed.append(replace(trajectory, loss_mask=mask, prompt_length=start))
    result.trajectories = tuple(changed)


def own_logprobs(sample: Sample, network: Policy) -> Sample:
    """Return the sample with the logprobs that the network computes."""
    batch = to_batch([sample])
    logprobs = np.zeros(len(sample.ids), np.float32)
    with torch.no_grad():
        logprobs[sample.loss_mask == 1] = network.logprobs(batch.ids, batch.trained).numpy()
    return replace(sample, logprobs=logprobs)


class FlakyDesk(Desk):
    """A desk whose database cannot be reached in one of 25 steps with tool calls, on average."""

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the task."""
        self._luck = np.random.default_rng(seed)
        return await super().reset(task, seed)

    async def step(self, action: Action) -> StepResult:
        """Run the calls, or raise `ConnectionError`."""
        if action.tool_calls and self._luck.random() < 1 / 25:
            raise ConnectionError("the database of the desk cannot be reached")
        return await super().step(action)


def flaky_desk(options: EnvironmentOptions) -> Desk:
    """Return a flaky desk with the brief policy."""
    return FlakyDesk(options, BRIEF_POLICY)


_FIND_LAST = (
    "{%- set seen = namespace(last=-1) -%}{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{%- set seen.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
)


def forgetful_template() -> str:
    """Return the chat template, changed so that it renders only the last turn's reasoning.

    If a turn has reasoning, the template leaves it out as soon as another turn follows. The next
    prompt then differs from the earlier tokens, so it starts a new sequence (a fork).
    """
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    shown = "{% if message.reasoning_content %}"
    assert shown in template
    only_last = "{% if message.reasoning_content and loop.index0 == seen.last %}"
    return _FIND_LAST + template.replace(shown, only_last)


MISTAKES: Mapping[str, Mistake] = {
    mistake.name: mistake
    for mistake in (
        Mistake("none"),
        Mistake("shifted-mask", change=_shifted),
        Mistake("mask-everywhere", change=_everywhere),
        Mistake("mask-inverted", change=_inverted),
        Mistake("tokens-from-text", change=_from_text),
        Mistake("failures", failures=True),
        Mistake("failures-are-reward-0", failures=True, failures_graded=True),
        Mistake("forks", forks=True),
        Mistake("forks-trained-twice", forks=True, forks_trained_twice=True),
    )
}
"""The controls by name."""
