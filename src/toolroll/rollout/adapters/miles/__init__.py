"""miles: `generate`, a function that you name on miles' command line.

    --custom-generate-function-path toolroll.rollout.adapters.miles.generate

Settings are `--toolroll-*` flags, or keys `toolroll_*` in the file of `--custom-config-path`.
`SlimeSettings` lists them. The rules are the same as in the slime adapter. A fork gives several
samples that share one `rollout_id`. An aborted episode has no reward, a zero mask and
`remove_sample`. `weight_versions` has one entry per span. Written for miles at commit 31f1ca96.
miles itself is imported only to create its `GenerateFnOutput`.
"""

from toolroll.rollout.adapters.miles.generate import generate

__all__ = ["generate"]
