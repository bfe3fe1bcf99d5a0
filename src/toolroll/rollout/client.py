"""The old name of `toolroll.rollout.server.in_process`."""

from toolroll.rollout.server.in_process import *  # noqa: F403
