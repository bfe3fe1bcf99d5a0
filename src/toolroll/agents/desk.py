"""The old name of `toolroll.agents.environments.desk`."""

from toolroll.agents.environments.desk import *  # noqa: F403
