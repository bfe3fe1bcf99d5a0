"""The old name of `toolroll.rollout.testing.play_episode`."""

from toolroll.rollout.testing.play_episode import *  # noqa: F403
