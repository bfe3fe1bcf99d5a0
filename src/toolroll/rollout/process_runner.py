"""The old name of `toolroll.rollout.runs.processes`."""

from toolroll.rollout.runs.processes import *  # noqa: F403
