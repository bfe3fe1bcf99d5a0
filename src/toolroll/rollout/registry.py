"""The old name of `toolroll.rollout.runs.registry`."""

from toolroll.rollout.runs.registry import *  # noqa: F403
