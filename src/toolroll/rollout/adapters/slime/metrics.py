"""Metrics of a rollout, for slime's logger.

Invariants: every episode counts once, even if it forked into several samples. Aborted episodes are
counted separately and are not included in means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from toolroll.rollout.adapters.slime.samples import KEY, leaves

_PER_EPISODE = (
    "turns",
    "invalid_calls",
    "lookalike_calls",
    "tool_calls",
    "tool_errors",
    "forks",
    "completion_tokens",
    "user_calls",
    "env_seconds",
)


def rollout_metrics(
    groups: Iterable[Sequence[Any]], *, prefix: str = "toolroll/"
) -> dict[str, float]:
    """Return means per episode, shares of episodes, and the `staleness` of weight versions. An item
    of a group is a sample, or a list of samples if the episode forked.
    """
    groups = [list(group) for group in groups]
    episodes = [item[0] if isinstance(item, list) else item for group in groups for item in group]
    graded = [sample for sample in episodes if sample.status.name != "ABORTED"]
    metrics = {"episodes": float(len(episodes)), "aborted": float(len(episodes) - len(graded))}
    numbers = [sample.metadata[KEY]["metrics"] for sample in graded]
    if numbers:
        for name in _PER_EPISODE:
            metrics[name] = sum(found.get(name, 0.0) for found in numbers) / len(numbers)
        prompts = sum(found.get("prompt_tokens", 0.0) for found in numbers)
        metrics["cached_share"] = (
            sum(found.get("cached_tokens", 0.0) for found in numbers) / prompts if prompts else 0.0
        )
        metrics["token_mismatches"] = sum(
            value
            for found in numbers
            for name, value in found.items()
            if name.startswith("token_mismatches/")
        )
        metrics["truncated_share"] = sum(
            sample.status.name == "TRUNCATED" for sample in graded
        ) / len(graded)
    metrics |= staleness(sample for group in groups for sample in leaves(group))
    return {prefix + name: value for name, value in metrics.items()}


def staleness(samples: Iterable[Any]) -> dict[str, float]:
    """Return the mean and maximum staleness of the sampled spans, and the share of samples with
    several weight versions. The staleness of a span is the newest weight version in `samples` minus
    the span's version. Return an empty dict if no version is a number.
    """
    versions = [
        [int(version) for version in sample.weight_versions if str(version).isdigit()]
        for sample in samples
    ]
    every = [version for found in versions for version in found]
    if not every:
        return {}
    newest = max(every)
    return {
        "weight_version_staleness_mean": sum(newest - version for version in every) / len(every),
        "weight_version_staleness_max": float(newest - min(every)),
        "mixed_version_share": sum(len(set(found)) > 1 for found in versions) / len(versions),
    }
