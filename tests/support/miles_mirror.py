"""miles' types as a generate function sees them, after miles at commit
31f1ca961a94cb860cec3b2dea34ec332bfa8f76 (see `support.standins`).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import pytest
from support.slime_mirror import SharedSample
from support.standins import stand_in, stands_for

COMMIT = "31f1ca961a94cb860cec3b2dea34ec332bfa8f76"


@stands_for("miles.utils.types:Sample")
@dataclass
class Sample(SharedSample):
    rollout_indexer_topk: Any = None
    opd_reverse_kl: list[float] | None = None
    adapter: Any = None
    reward_spec: Any = None
    routing_key: str | None = None


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
