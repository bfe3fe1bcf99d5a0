"""The command line: the command `toolroll` and its subcommands."""

from toolroll.cli.app import command as main

__all__ = ["main"]
