"""Hand-made episodes, for tests of files, rates, reports and pages."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from toolroll.rollout.episode import Episode, InteractionResult
from toolroll.rollout.runs.episode_file import to_line
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.types import Message, StopReason, Trajectory, Turn, WeightVersion


def trajectory(
    length: int = 12, spans: Sequence[tuple[int, int]] = ((4, 7), (9, 12)), **more: Any
) -> Trajectory:
    """A sequence of ids 100, 101 ... in which `spans` were sampled."""
    mask = np.zeros(length, dtype=np.int32)
    logprobs = np.full(length, np.nan, dtype=np.float32)
    turns = []
    for number, (start, stop) in enumerate(spans):
        mask[start:stop] = 1
        logprobs[start:stop] = -0.25 * np.arange(1, stop - start + 1)
        versions = (WeightVersion(f"v{number}", start, stop),)
        counts = (start, start // 2, 0.5 + number)
        turns.append(Turn(start, stop, "stop", 2, versions, {"temperature": 1.0}, *counts))
    ids = np.arange(100, 100 + length, dtype=np.int32)
    return Trajectory(ids, mask, logprobs, tuple(turns), spans[0][0] if spans else length, **more)


def episode(
    task: str = "t-0",
    sample: int = 0,
    reward: float | None = 1.0,
    *,
    env: str = "pond",
    reason: StopReason = StopReason.DONE,
    messages: list[Message] | None = None,
    trajectories: Sequence[Trajectory] | None = None,
    metrics: dict[str, float] | None = None,
    info: dict[str, Any] | None = None,
) -> Episode:
    """One finished episode; aborted ones lose their reward."""
    talk = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Goodbye."}]
    result = InteractionResult.of(
        [trajectory()] if trajectories is None else trajectories,
        prompt="<|user|>Hello.",
        reward=None if reason.status.value == "aborted" else reward,
        messages=talk if messages is None else messages,
        info=info or {},
        stop_reason=reason,
        metrics={"turns": 2.0, "seconds": 1.0} if metrics is None else metrics,
    )
    index = int(task.rpartition("-")[2]) if task.rpartition("-")[2].isdigit() else 0
    return Episode(env, task, index, sample, 7 * sample + 1, result, "tiny")


def content(found: Episode, *, circumstances: bool = True) -> dict[str, Any]:
    """Everything in an episode as plain data that can be compared; without `circumstances`, what
    depends neither on the clock nor on the engine's cache."""
    data: dict[str, Any] = orjson.loads(to_line(found))
    if not circumstances:
        kept = [name for name in data["metrics"] if not _CIRCUMSTANCE.search(name)]
        data["metrics"] = {name: data["metrics"][name] for name in kept}
        for part in data["trajectories"]:
            for turn in part["turns"]:
                del turn["latency"], turn["cached_tokens"]
    return data


_CIRCUMSTANCE = re.compile("seconds$|^cached_tokens$|^reruns$|^engine_retries$")


def exported() -> list[Episode]:
    """Episodes of a run to export: a fork, and everything that may not be trained on."""
    untrained, fork = trajectory(), trajectory(14, [(6, 9)], fork_reason="rewritten")
    untrained.loss_mask[:] = 0
    return [
        episode("t-0", 0, 1.0, trajectories=[trajectory(), fork]),
        episode("t-0", 1, 0.0, trajectories=[trajectory(13, [(5, 8)])]),
        episode("t-1", 0, 0.5, trajectories=[untrained]),
        episode("t-1", 1, 0.5, trajectories=[trajectory(source="transcript")]),
        episode("t-2", 0, reason=StopReason.ENGINE_ERROR),
        episode("t-2", 1, 1.0, trajectories=[], info={"trainable": False}),
    ]


def summary_of(*episodes: Episode) -> Summary:
    """The summary of episodes of the environment `pond`."""
    summary = Summary("pond")
    for one in episodes:
        summary.add(one)
    return summary
