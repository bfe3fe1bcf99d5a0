"""The command line: `toolroll run`, `serve`, `envs`, `tasks`, `check-template`, `engine`,
`demo`.
"""

from toolroll.rollout.cli.app import main

__all__ = ["main"]
