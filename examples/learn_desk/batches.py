"""`Sample`: one training sequence. `Batch`: several samples as tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toolroll import InteractionResult
from toolroll.trainers.sequences import training_sequences


@dataclass(frozen=True)
class Sample:
    """Three arrays with one value per token. `logprobs` is 0 where `loss_mask` is 0."""

    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


def samples_of(result: InteractionResult) -> list[Sample]:
    """Return the trained sequences of an episode. `training_sequences` chooses them, as for every
    adapter.
    """
    return [
        Sample(
            np.array(one.prompt_ids + one.response_ids, np.int32),
            np.array([0] * len(one.prompt_ids) + one.loss_mask, np.int32),
            np.array([0.0] * len(one.prompt_ids) + one.logprobs, np.float32),
        )
        for one in training_sequences(result)
        if one.trained_tokens
    ]


@dataclass(frozen=True)
class Batch:
    """Samples as rows, padded on the right. All tensors have the shape [samples, tokens]."""

    ids: Tensor
    trained: Tensor
    logprobs: Tensor


def to_batch(samples: Sequence[Sample]) -> Batch:
    """Return the samples as tensors: int64, bool and float32."""
    length = max(len(sample.ids) for sample in samples)
    ids = np.zeros((len(samples), length), np.int64)
    trained = np.zeros((len(samples), length), bool)
    logprobs = np.zeros((len(samples), length), np.float32)
    for at, sample in enumerate(samples):
        end = len(sample.ids)
        ids[at, :end] = sample.ids
        trained[at, :end] = sample.loss_mask
        logprobs[at, :end] = sample.logprobs
    return Batch(torch.from_numpy(ids), torch.from_numpy(trained), torch.from_numpy(logprobs))


def shuffled(samples: Sequence[Sample], size: int, rng: random.Random) -> Iterator[list[Sample]]:
    """Yield batches of `size` samples forever, in random order. The samples of a batch have about
    the same length. Raise `ValueError` if there are fewer than `size` samples.
    """
    if len(samples) < size:
        raise ValueError(f"{len(samples)} samples do not fill a batch of {size}")
    while True:
        order = sorted(
            range(len(samples)), key=lambda at: len(samples[at].ids) * rng.uniform(0.8, 1.2)
        )
        starts = list(range(0, len(order) - size + 1, size))
        rng.shuffle(starts)
        for start in starts:
            yield [samples[at] for at in order[start : start + size]]


def save_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write samples to an npz file, without their logprobs. If this is interrupted, there is no
    file.
    """
    new = path.with_suffix(".new.npz")
    np.savez_compressed(
        new,
        lengths=np.array([len(sample.ids) for sample in samples]),
        ids=np.concatenate([sample.ids for sample in samples]),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
    )
    new.replace(path)


def load_samples(path: Path) -> list[Sample]:
    """Return the samples in a file that `save_samples` wrote. Their logprobs are 0."""
    with np.load(path) as file:
        lengths, ids, mask = file["lengths"], file["ids"].astype(np.int32), file["loss_mask"]
    ends = np.cumsum(lengths)
    return [
        Sample(ids[end - size : end], mask[end - size : end], np.zeros(size, np.float32))
        for size, end in zip(lengths.tolist(), ends.tolist(), strict=True)
    ]
