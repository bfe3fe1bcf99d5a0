"""The command line in this process, and runs of it in another one."""

import asyncio
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from toolroll.cli.app import app, main
from toolroll.rollout.runs.registry import find_environment
from toolroll.testing import Policy, PolicyRequest, Reply, play_references


def toolroll(*arguments: object) -> Result:
    """The command's result; an error that is no exit is raised."""
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_main(patch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command as a shell does, in this process, and return its exit status."""
    patch.setattr(sys, "argv", ["toolroll", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def run_command(url: str, *arguments: object, env: str = "desk") -> list[str]:
    """`toolroll run` of `env` with the embedded engine at `url`, as words."""
    options = f"--engine {url} --model embedded --parser hermes".split()
    return ["run", env, *options, *map(str, arguments)]


def serve_command(url: str, *options: str) -> list[str]:
    """`toolroll serve` on a free port with the embedded engine at `url`, as words."""
    return ["serve", "--model", "embedded", "--engine", url, "--port", "0", *options]


def lines(folder: Path) -> int:
    """How many episodes the run in `folder` has written."""
    file = folder / "episodes.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def holding(stuck: list[PolicyRequest]) -> Policy:
    """A policy under which three of the desk's tasks 0 to 5 do not end."""
    found = find_environment("desk")
    known = play_references(found, found.tasks("test"), samples=1)
    held = {task.id for task in found.tasks("test")[3:6]}

    def policy(request: PolicyRequest) -> str | Reply:
        if request.routing_key.split("/")[1].split("#")[0] in held and len(stuck) < 3:
            stuck.append(request)
            return Reply("This takes long.", hold=asyncio.Event(), hold_after=1)
        said = known[request.routing_key]
        return said[min(request.text.count("<|turn|>assistant") - 1, len(said) - 1)]

    return policy
