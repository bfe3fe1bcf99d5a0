"""The old name of `toolroll.agents.environments.tau_bench`."""

from toolroll.agents.environments.tau_bench import *  # noqa: F403
