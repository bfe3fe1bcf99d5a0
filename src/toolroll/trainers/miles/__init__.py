"""miles: `generate`, a function that you name on miles' command line.

    --custom-generate-function-path toolroll.trainers.miles.generate

Settings are `--toolroll-*` flags, or keys `toolroll_*` in the file of `--custom-config-path`.
`SlimeSettings` lists them. The rules are the same as in the slime adapter. A fork gives several
samples that share one `rollout_id`. An aborted episode has no reward, a zero mask and
`remove_sample`. `weight_versions` has one entry per span. Written for miles at commit 31f1ca96.
miles itself is imported only to create its `GenerateFnOutput`.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any, get_args

from toolroll.trainers.slime.generation import play_sample
from toolroll.trainers.slime.settings import PREFIX, SlimeSettings

__all__ = ["generate"]


async def generate(input: Any) -> Any:
    """Play the task whose index is `input.sample.prompt`. Return miles' `GenerateFnOutput`.

    Once miles aborts the rollout (`input.state.aborted`), no further turn is started. Raise
    `UsageError` if the settings are not valid.
    """
    # Miles recognizes its own signature by the parameter's name, `input`.
    samples = await play_sample(
        input.args,
        input.sample,
        input.sampling_params,
        evaluation=input.evaluation,
        stopped=lambda: bool(input.state.aborted),
    )
    return import_module("miles.rollout.base_types").GenerateFnOutput(samples=samples)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag `--toolroll-*` for each setting. Settings that are dicts take JSON."""
    group = parser.add_argument_group("toolroll")
    for name, field in SlimeSettings.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        group.add_argument(
            "--" + (PREFIX + name).replace("_", "-"),
            default=argparse.SUPPRESS,  # an attribute means that it is set
            type=json.loads if any("dict[" in str(kind) for kind in kinds) else str,
            help=(field.description or "").replace("%", "%%"),
        )


generate.add_arguments = _add_arguments  # type: ignore[attr-defined]
