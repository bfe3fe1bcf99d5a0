"""`sample_rows`: the training samples of a run, one row per training sequence.

Invariants:

- Aborted episodes are left out, and so are sequences without a trained token and sequences that no
  engine sampled, such as those of a baseline.
- `loss_mask` and `logprobs` have one value for each token of `input_ids`.
- The logprobs of tokens that were not sampled are null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.session.trajectory_json import to_json
from toolroll.rollout.types import Episode, Status, Trajectory

_TAKEN = ("input_ids", "loss_mask", "logprobs", "prompt_length", "fork_reason")


def sample_rows(episodes: Iterable[Episode]) -> Iterator[dict[str, Any]]:
    """Yield one row of plain values per sequence. `messages` and `tools` are JSON text, because a
    column of a Parquet file has one type, but their structure differs between episodes.
    """
    for episode in episodes:
        result = episode.result
        if result.reward is None or result.status is Status.ABORTED:
            continue
        for number, part in enumerate(result.trajectories):
            if part.source == "engine" and part.trained_tokens:
                yield _row(episode, number, part)


def _row(episode: Episode, number: int, part: Trajectory) -> dict[str, Any]:
    result, values = episode.result, to_json(part)
    return {
        "env": episode.env,
        "task_id": episode.task_id,
        "task_index": episode.task_index,
        "sample": episode.sample,
        "sequence": number,
        "seed": episode.seed,
        "model": episode.model,
        "reward": result.reward,
        "status": result.status.value,
        "stop_reason": str(result.stop_reason),
        **{name: values[name] for name in _TAKEN},
        "weight_versions": [
            {"version": span.version, "start": span.start, "stop": span.stop}
            for span in part.weight_versions
        ],
        "messages": json_bytes(result.messages).decode(),
        "tools": json_bytes(result.tools).decode(),
    }
