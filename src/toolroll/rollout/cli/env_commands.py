"""`toolroll new-env` and `toolroll check-env`: the commands for your own environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from toolroll.rollout.runs.config import json_object
from toolroll.rollout.runtime.event_loop import run


def new_env(
    name: Annotated[str, typer.Argument(help="its name: lowercase letters, digits and hyphens")],
    at: Annotated[Path, typer.Option(help="the folder to write into")] = Path(),
    *,
    package: Annotated[
        bool, typer.Option("--package", help="write a package with an entry point")
    ] = False,
) -> None:
    """Write a small working environment and its test, as a starting point for your own.

    Example: toolroll new-env my-bench
    """
    from toolroll.rollout.cli.new_env import new_env as write_file
    from toolroll.rollout.cli.new_env import new_package

    if package:
        folder = new_package(name, at)
        _say(f"Wrote {folder}. Install and test it:")
        _say(f"  pip install pytest -e {folder} && python -m pytest {folder}")
        _say(f"Then `toolroll envs` lists {name}.")
        return
    file = write_file(name, at)
    test = file.with_name(f"test_{file.name}")
    _say(f"Wrote {file} and {test}. Next:")
    _say(f"  toolroll check-env {file}:env")
    _say(f"  pip install pytest && python -m pytest {test}")
    _say(f"  toolroll run {file}:env --engine http://127.0.0.1:30000 --model MODEL")


def check_env(
    env: Annotated[
        str,
        typer.Argument(help="an environment: a name of `toolroll envs`, FILE.py:NAME, MODULE:NAME"),
    ],
    env_args: Annotated[
        str | None, typer.Option(help="JSON: the arguments of the environment's class or function")
    ] = None,
    split: Annotated[str | None, typer.Option(help="default: the environment's first")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="which tasks: 3, 0-9, 0-4,7; default: the first 20")
    ] = None,
) -> None:
    """Check an environment before you play it: seeds, references, wrong arguments, blocking calls,
    concurrent episodes. Exit with 1 if a check failed.

    Example: toolroll check-env env.py:env
    """
    from toolroll.rollout.cli.check_env import check, results_table
    from toolroll.rollout.runs.registry import choose_tasks, load_environment

    factory = load_environment(env, json_object(env_args, "--env-args"))
    chosen = choose_tasks(factory, split, tasks)
    results = run(check(factory, chosen if tasks is not None else chosen[:20]))
    console = Console()
    console.print(results_table(factory.name, results))
    if any(result.status == "failed" for result in results):
        raise typer.Exit(1)


def _say(line: str) -> None:
    Console().print(line, highlight=False, markup=False, soft_wrap=True)
