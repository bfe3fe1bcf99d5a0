"""The JSON form of a trajectory, for `episodes.jsonl`, the endpoint's `/trajectories` and exports.
docs/trajectory-format.md describes each field.

Invariants: `from_json(to_json(x))` equals `x`, except for `spans`, which are not stored. The
logprob of a token that was not sampled is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from toolroll.rollout.media import Image
from toolroll.rollout.runtime.jsonable import LARGEST
from toolroll.rollout.runtime.routed_experts import ExpertsRecord
from toolroll.rollout.runtime.routed_experts import to_json as experts_to_json
from toolroll.rollout.types import Trajectory, Turn, WeightVersion

CONSTRAINTS = ("ebnf", "json_schema", "regex", "structural_tag")
"""Sampling parameters that constrain the output to a grammar or a schema."""

_IMAGE_FIELDS = ("position", "count", "sha256")

Count = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Logprob = Annotated[float, Field(ge=-3e38, le=3e38)]
"""A finite float32."""
TokenId = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
Masked = Annotated[int, Field(strict=True, ge=0, le=1)]


class TurnRecord(BaseModel):
    """One sampled turn: the tokens [start, stop) of the sequence."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    start: Count
    stop: Count
    finish_reason: str
    matched: int | str | None = None
    weight_versions: list[tuple[str, Count, Count]] = []
    sampling_params: dict[str, Any] = {}
    constrained: str | None = None
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    latency: Number = 0.0
    excluded: str | None = None
    reward: Number = 0.0


class TrajectoryRecord(BaseModel):
    """One training sequence. `input_ids`, `loss_mask` and `logprobs` have the same length."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    input_ids: list[TokenId]
    loss_mask: list[Masked]
    logprobs: list[Logprob | None]
    turns: list[TurnRecord]
    prompt_length: Count
    source: Literal["engine", "transcript"] = "engine"
    fork_reason: str | None = None
    routed_experts: ExpertsRecord | None = None
    lineage: dict[str, str] = {}
    media: list[Image] = []


def to_json(trajectory: Trajectory, *, arrays: bool = False) -> dict[str, Any]:
    """Return the trajectory in the form of `TrajectoryRecord`, as plain data.

    If `arrays` is True, the lists are numpy arrays, which orjson writes faster. orjson writes NaN
    as null, and each logprob with the fewest digits that give the same float32.
    """
    of: Callable[[Any], Any] = np.ascontiguousarray if arrays else _plain
    experts, lineage = trajectory.routed_experts, trajectory.lineage
    extra: dict[str, Any] = {} if experts is None else {"routed_experts": experts_to_json(experts)}
    if trajectory.media:
        extra["media"] = [
            {name: getattr(image, name) for name in _IMAGE_FIELDS} for image in trajectory.media
        ]
    return ({**extra, "lineage": dict(lineage)} if lineage else extra) | {
        "input_ids": of(trajectory.input_ids),
        "loss_mask": of(trajectory.loss_mask),
        "logprobs": of(trajectory.logprobs),
        "prompt_length": trajectory.prompt_length,
        "source": trajectory.source,
        "fork_reason": trajectory.fork_reason,
        "turns": [_turn_to_json(turn) for turn in trajectory.turns],
    }


def from_json(data: Mapping[str, Any] | TrajectoryRecord) -> Trajectory:
    """Return the trajectory from its JSON form `data`. `to_json` is the inverse.

    Raise `pydantic.ValidationError` if `data` is not a valid `TrajectoryRecord`.
    """
    record = TrajectoryRecord.model_validate(data)
    experts = record.routed_experts
    return Trajectory(
        np.array(record.input_ids, dtype=np.int32),
        np.array(record.loss_mask, dtype=np.int32),
        np.array([np.nan if x is None else x for x in record.logprobs], dtype=np.float32),
        tuple(_turn_from_json(turn) for turn in record.turns),
        record.prompt_length,
        record.source,
        record.fork_reason,
        routed_experts=None if experts is None else experts.rows(),
        lineage=record.lineage,
        media=tuple(record.media),
    )


def _plain(values: Any) -> list[Any]:
    """Return `values` as nested lists, with None for NaN."""
    plain: list[Any] = values.tolist()
    return [None if value != value else value for value in plain]


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    params = dict(turn.sampling_params)
    return {
        "start": turn.start,
        "stop": turn.stop,
        "finish_reason": turn.finish_reason,
        "matched": turn.matched,
        "weight_versions": [[span.version, span.start, span.stop] for span in turn.weight_versions],
        "sampling_params": params,
        "constrained": next((name for name in CONSTRAINTS if params.get(name)), None),
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "latency": turn.latency,
        "excluded": turn.excluded,
        "reward": turn.reward,
    }


def _turn_from_json(record: TurnRecord) -> Turn:
    data = record.model_dump(exclude={"constrained"})
    data["weight_versions"] = tuple(WeightVersion(*span) for span in record.weight_versions)
    return Turn(**data)
