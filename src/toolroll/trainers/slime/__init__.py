"""slime: functions that you name on slime's command line. `generate` also works in miles, as the
older form of its generate functions.

    --custom-generate-function-path toolroll.trainers.slime.generate
    --rollout-function-path toolroll.trainers.slime.generate_rollout
    --eval-function-path toolroll.trainers.slime.generate_rollout
    --dynamic-sampling-filter-path toolroll.trainers.slime.keep_group
    --custom-reward-post-process-path toolroll.trainers.slime.normalize_rewards

Settings are attributes of `args` named `toolroll_*` (`--custom-config-path FILE.yaml`).
`SlimeSettings` lists them. Written for slime at commit 624b824a. slime itself is imported only to
create its own types.
"""

from toolroll.trainers.slime.generation import aclose, generate
from toolroll.trainers.slime.rewards import normalize_rewards
from toolroll.trainers.slime.samples import keep_group, to_samples
from toolroll.trainers.slime.settings import SlimeSettings, read_settings
from toolroll.trainers.slime.training import close_rollout, generate_rollout

__all__ = [
    "SlimeSettings",
    "aclose",
    "close_rollout",
    "generate",
    "generate_rollout",
    "keep_group",
    "normalize_rewards",
    "read_settings",
    "to_samples",
]
