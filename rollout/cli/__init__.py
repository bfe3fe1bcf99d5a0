"""The command line: `toolroll run`, `envs`, `engine`, `demo`."""

from toolroll.rollout.cli.app import main

__all__ = ["main"]
