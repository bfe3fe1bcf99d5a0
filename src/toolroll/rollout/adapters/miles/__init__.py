"""miles: `generate`, a function to name on miles' command line.

    --custom-generate-function-path toolroll.rollout.adapters.miles.generate

Settings are `--toolroll-*` flags, or keys `toolroll_*` of the file of `--custom-config-path`;
`SlimeSettings` lists them. The rules are those of the slime adapter. A fork gives several samples
that share one `rollout_id`. An aborted episode has no reward, a zero mask and `remove_sample`.
`weight_versions` has one entry for each span. Written for miles at commit 31f1ca96; miles itself is
imported only to make its `GenerateFnOutput`.
"""

from toolroll.rollout.adapters.miles.generate import generate

__all__ = ["generate"]
