"""Policy gradient with the logprobs that the engine returned: GRPO's advantages and PPO's clipped
ratio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from examples.learn_desk.batches import Sample, samples_of, to_batch
from examples.learn_desk.network import Policy
from torch import Tensor

from toolroll import Episode
from toolroll.trainers.advantages import group_advantages

UPDATES = 2
"""The number of optimizer steps for each batch."""

CLIP = 0.2
TOKENS = 16_384
"""The maximum number of tokens, including padding, in one forward pass."""


@dataclass(frozen=True)
class Scored:
    """A sample and the advantage of its episode."""

    sample: Sample
    advantage: float


@dataclass(frozen=True)
class Agreement:
    """The largest and the mean absolute difference between the trainer's logprobs and the recorded
    ones, over `tokens` tokens, and the one that 99 % of them do not exceed.
    """

    tokens: int
    largest: float
    mean: float
    p99: float


def with_advantages(episodes: Sequence[Episode]) -> list[tuple[Episode, float]]:
    """Return the episodes of all groups whose rewards differ, with their advantages. A group is the
    episodes of one task.
    """
    groups: defaultdict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.task_id].append(episode)
    found = []
    for group in groups.values():
        advantages = group_advantages([episode.result for episode in group])
        for episode, advantage in zip(group, advantages, strict=True):
            # None: the episode was aborted. 0: its group has equal rewards.
            if advantage:
                found.append((episode, advantage))
    return found


def scored(episodes: Sequence[Episode]) -> list[Scored]:
    """Return the samples of the episodes with their advantages, as `with_advantages`."""
    return [
        Scored(sample, advantage)
        for episode, advantage in with_advantages(episodes)
        for sample in samples_of(episode.result)
    ]


def agreement(network: Policy, samples: Sequence[Sample]) -> Agreement:
    """Compare the recorded logprobs of all trained tokens with those that the network computes."""
    differences = []
    with torch.no_grad():
        for chunk in chunks([Scored(sample, 0.0) for sample in samples]):
            batch = to_batch([one.sample for one in chunk])
            found = network.logprobs(batch.ids, batch.trained)
            differences.append((found - batch.logprobs[batch.trained]).abs())
    every = torch.cat(differences)
    ordered = every.sort().values
    p99 = float(ordered[int(0.99 * (len(ordered) - 1))])
    return Agreement(len(every), float(ordered[-1]), float(every.mean()), p99)


def updates(
    network: Policy, optimizer: torch.optim.Optimizer, batch: Sequence[Scored]
) -> list[float]:
    """Make `UPDATES` steps of the optimizer, each with a part of the batch. Return the norms of the
    gradients.
    """
    parts = [part for at in range(UPDATES) if (part := batch[at::UPDATES])]
    return [update(network, optimizer, part) for part in parts]


def update(network: Policy, optimizer: torch.optim.Optimizer, batch: Sequence[Scored]) -> float:
    """Make one step of the optimizer. Return the norm of the gradient before it is clipped.

    The loss is the mean over the trained tokens of all samples.
    """
    tokens = sum(int(one.sample.loss_mask.sum()) for one in batch)
    optimizer.zero_grad()
    for chunk in chunks(batch):
        (_loss(network, chunk) / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return float(norm)


def _loss(network: Policy, chunk: Sequence[Scored]) -> Tensor:
    batch = to_batch([one.sample for one in chunk])
    advantages = torch.tensor([one.advantage for one in chunk]).unsqueeze(1)
    advantages = advantages.expand(batch.ids.shape)[batch.trained]
    logprobs = network.logprobs(batch.ids, batch.trained)
    ratio = (logprobs - batch.logprobs[batch.trained]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def chunks(batch: Sequence[Scored], tokens: int = TOKENS) -> list[list[Scored]]:
    """Return the samples in chunks of at most `tokens` tokens. The samples of a chunk have similar
    lengths.
    """
    found: list[list[Scored]] = []
    for one in sorted(batch, key=lambda each: len(each.sample.ids)):
        if not found or (len(found[-1]) + 1) * len(one.sample.ids) > tokens:
            found.append([])
        found[-1].append(one)
    return found
