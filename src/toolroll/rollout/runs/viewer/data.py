"""An episode as the page's data: a row of its table, and the detail behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from toolroll.rollout.runs.viewer.pieces import Pieces
from toolroll.rollout.types import Episode, Trajectory, Turn


def row(episode: Episode) -> dict[str, Any]:
    """What the table shows and filters by."""
    result = episode.result
    metrics = result.metrics
    return {
        "env": episode.env,
        "task": episode.task_id,
        "sample": episode.sample,
        "seed": episode.seed,
        "status": result.status.value,
        "stop": str(result.stop_reason),
        "reward": result.reward,
        "turns": int(metrics.get("turns", 0)),
        "tokens": sum(len(part) for part in result.trajectories)
        or int(metrics.get("completion_tokens", 0)),
        "trained": sum(part.trained_tokens for part in result.trajectories),
        "calls": int(metrics.get("tool_calls", 0)),
        "invalid": int(metrics.get("invalid_calls", 0)),
        "forks": max(len(result.trajectories) - 1, 0),
        "seconds": round(metrics.get("seconds", 0.0), 3),
        "tools": sorted(_called(result.messages)),
    }


def detail(episode: Episode, pieces: Pieces | None, *, tokens: bool) -> dict[str, Any]:
    """What one episode's view shows. `pieces` None: ids stand for the tokens' texts. Without
    `tokens` the sequences are left out.
    """
    result = episode.result
    return {
        "messages": result.messages,
        "toolNames": [tool.get("function", tool).get("name") for tool in result.tools],
        "info": result.info,
        "metrics": result.metrics,
        "stepRewards": list(result.step_rewards),
        "sequences": [_sequence(part, pieces) for part in result.trajectories] if tokens else None,
    }


def _sequence(part: Trajectory, pieces: Pieces | None) -> dict[str, Any]:
    ids = part.input_ids.tolist()
    return {
        "ids": ids,
        "texts": pieces.of(ids) if pieces is not None else [f"{index} " for index in ids],
        "mask": "".join("1" if bit else "0" for bit in part.loss_mask.tolist()),
        "logprobs": [
            None if math.isnan(value) else round(value, 4) for value in part.logprobs.tolist()
        ],
        "promptLength": part.prompt_length,
        "source": part.source,
        "forkReason": part.fork_reason,
        "turns": [_turn(turn) for turn in part.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "start": turn.start,
        "stop": turn.stop,
        "finish": turn.finish_reason,
        "excluded": turn.excluded,
        "versions": [[span.version, span.start, span.stop] for span in turn.weight_versions],
        "params": dict(turn.sampling_params),
        "prompt": turn.prompt_tokens,
        "cached": turn.cached_tokens,
        "latency": round(turn.latency, 4),
    }


def _called(messages: list[dict[str, Any]]) -> set[str]:
    names = set()
    for message in messages:
        for call in message.get("tool_calls") or ():
            function: Mapping[str, Any] = call.get("function") or {}
            names.add(str(function.get("name") or "unknown"))
    return names
