"""The command line of a run."""

from __future__ import annotations


def run_command(url: str, *arguments: object, env: str = "desk") -> list[str]:
    """`toolroll run` of `env` with the embedded engine at `url`, as words."""
    options = f"--engine {url} --model embedded --parser hermes".split()
    return ["run", env, *options, *map(str, arguments)]
