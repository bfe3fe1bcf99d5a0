"""The old name of `toolroll.rollout.runs.episode_file`."""

from toolroll.rollout.runs.episode_file import *  # noqa: F403
