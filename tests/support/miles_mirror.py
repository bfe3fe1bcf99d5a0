"""miles' types as a generate function sees them, after miles at commit
31f1ca961a94cb860cec3b2dea34ec332bfa8f76 (see `support.standins`).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from support import slime_mirror
from support.standins import stand_in, stands_for

COMMIT = "31f1ca961a94cb860cec3b2dea34ec332bfa8f76"


@stands_for("miles.utils.types:Sample")
@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    adapter: Any = None
    reward_spec: Any = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: Any = field(default_factory=slime_mirror.Sample.SpecInfo)
    prefix_cache_info: Any = field(default_factory=slime_mirror.Sample.PrefixCacheInfo)


@stands_for(
    "miles.rollout.inference_rollout.inference_rollout_common:GenerateState", own="__init__"
)
@dataclass
class GenerateState:
    """What a generate function reads of miles' `GenerateState`."""

    args: Namespace
    aborted: bool = False


@stands_for("miles.rollout.base_types:GenerateFnInput")
@dataclass(frozen=True)
class GenerateFnInput:
    state: GenerateState
    sample: Any
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> Namespace:
        return self.state.args


@stands_for("miles.rollout.base_types:GenerateFnOutput")
@dataclass(frozen=True)
class GenerateFnOutput:
    samples: Any


@stands_for("miles.utils.lora:lora_rollout_enabled")
def lora_rollout_enabled(args: Namespace) -> bool:
    return not args.lora_train_only


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the mirror importable as miles, whether or not miles is installed."""
    modules: dict[str, dict[str, Any]] = {
        "miles": {},
        "miles.rollout": {},
        "miles.rollout.base_types": {
            "GenerateFnInput": GenerateFnInput,
            "GenerateFnOutput": GenerateFnOutput,
        },
        "miles.utils": {},
        "miles.utils.lora": {
            "LORA_ADAPTER_NAME": "miles_lora",
            "lora_rollout_enabled": lora_rollout_enabled,
        },
    }
    stand_in(monkeypatch, modules)
