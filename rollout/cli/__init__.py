"""The command line: `toolroll run`, `envs`, `tasks`, `check-template`, `engine`, `demo`."""

from toolroll.rollout.cli.app import main

__all__ = ["main"]
