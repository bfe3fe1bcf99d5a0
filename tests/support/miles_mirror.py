"""miles' types as a generate function sees them, after miles at commit
31f1ca961a94cb860cec3b2dea34ec332bfa8f76 (see `support.standins`).
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import pytest
from support.standins import recorded_class, stand_in, stands_for

COMMIT = "31f1ca961a94cb860cec3b2dea34ec332bfa8f76"


Sample = recorded_class("miles.utils.types:Sample")
GenerateFnOutput = recorded_class("miles.rollout.base_types:GenerateFnOutput")


@stands_for(
    "miles.rollout.inference_rollout.inference_rollout_common:GenerateState", own="__init__"
)
@dataclass
class GenerateState:
    """What a generate function reads of miles' `GenerateState`."""

    args: Namespace
    aborted: bool = False


_INPUT = "miles.rollout.base_types:GenerateFnInput"


@stands_for(_INPUT)
class GenerateFnInput(recorded_class(_INPUT)):  # type: ignore[misc]
    @property
    def args(self) -> Any:
        return self.state.args


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
