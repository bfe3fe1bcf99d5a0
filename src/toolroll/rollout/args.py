"""The old import path of `toolroll.rollout.model.config`."""

from toolroll.rollout.model.config import *  # noqa: F403
