"""The command line: `toolroll run`, `serve`, `envs`, `engine`, `demo`."""

from toolroll.rollout.cli.app import main

__all__ = ["main"]
