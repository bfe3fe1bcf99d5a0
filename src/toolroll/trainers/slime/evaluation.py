"""Play evaluation datasets, and return the `data` of slime's `RolloutFnEvalOutput`.

Invariants: `rewards`, `truncated` and `samples` have the same length and contain only graded
episodes. The number of aborted episodes is a separate metric. A dataset without a graded episode is
an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.trainers.episodes import gather
from toolroll.trainers.slime.generation import player, with_sample_hooks
from toolroll.trainers.slime.samples import failure, rollout_metrics
from toolroll.trainers.slime.settings import attribute, check_supported, seeded


async def evaluate(
    args: Any, rollout_id: int
) -> tuple[dict[str, dict[str, list[Any]]], dict[str, float]]:
    """Play all of `args.eval_datasets`, one after another. Return the `data` of slime's
    `RolloutFnEvalOutput`, by dataset name, and its `metrics`.
    """
    datasets = attribute(args, "eval_datasets", [])
    if not datasets:
        raise UsageError(
            "there is nothing to evaluate: set --eval-prompt-data NAME FILE, with a file from "
            "`toolroll tasks`"
        )
    data: dict[str, dict[str, list[Any]]] = {}
    metrics: dict[str, float] = {}
    for dataset in datasets:
        data[dataset.name], numbers = await _evaluate_one(args, dataset)
        metrics |= numbers
    return data, metrics


async def _evaluate_one(args: Any, dataset: Any) -> tuple[dict[str, list[Any]], dict[str, float]]:
    playing = player(args)
    check_supported(args, evaluation=True)
    params = eval_sampling_params(args, dataset)
    samples = read_samples(dataset)
    repeats = attribute(dataset, "n_samples_per_eval_prompt", 1)

    async def play(position: int, sample: Any) -> list[Any]:
        async with playing.limit:
            episode = await playing.play(sample, seeded(args, params, position % repeats))
        return [await with_sample_hooks(args, episode[0], evaluation=True), *episode[1:]]

    episodes = await gather(play(*numbered) for numbered in enumerate(samples))
    aborted = type(samples[0]).Status.ABORTED
    graded = [episode[0] for episode in episodes if episode[0].status is not aborted]
    if not graded:
        raise RolloutError(
            f"evaluation {dataset.name}: none of {len(episodes)} episodes could be graded; the "
            f"last episode: {failure(episodes[-1][0])}"
        )
    reward_key = attribute(args, "reward_key")
    eval_key = attribute(args, "eval_reward_key") or reward_key
    data = {
        "rewards": [sample.reward[eval_key] if eval_key else sample.reward for sample in graded],
        "truncated": [sample.status is type(sample).Status.TRUNCATED for sample in graded],
        "samples": graded,
    }
    return data, rollout_metrics([episodes], prefix=f"eval/{dataset.name}/toolroll/")


def eval_sampling_params(args: Any, dataset: Any) -> dict[str, Any]:
    """Return the sampling parameters that slime's own evaluation uses."""
    names = "temperature top_p top_k stop stop_token_ids repetition_penalty min_new_tokens"
    params = {name: attribute(dataset, name) for name in names.split()}
    params["max_new_tokens"] = dataset.max_response_len
    for name in ("stop", "stop_token_ids"):
        if params[name] is None:
            params[name] = attribute(args, f"rollout_{name}")
    return params


def read_samples(dataset: Any) -> Sequence[Any]:
    """Return slime's samples: `n_samples_per_eval_prompt` samples for each row of the dataset."""
    make = import_module("slime.utils.types").Sample
    path = Path(dataset.path)
    if not path.is_file():
        raise UsageError(f"evaluation {dataset.name}: {dataset.path} does not exist")
    samples: list[Any] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        row = orjson.loads(line)
        key = attribute(dataset, "input_key", "index")
        if key not in row:
            raise UsageError(
                f"{dataset.path}, line {number} has no key {key!r}: for a file from `toolroll "
                f"tasks`, set --eval-input-key index"
            )
        for _ in range(attribute(dataset, "n_samples_per_eval_prompt", 1)):
            metadata = {
                **(row.get(attribute(dataset, "metadata_key", "metadata")) or {}),
                **attribute(dataset, "metadata_overrides", {}),
            }
            samples.append(make(index=len(samples), prompt=row[key], metadata=metadata))
    if not samples:
        raise UsageError(f"evaluation {dataset.name}: {dataset.path} has no tasks")
    return samples
