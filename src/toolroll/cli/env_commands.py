"""`toolroll new-env` and `toolroll check-env`: the commands for your own environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolroll.cli.display import Output, print_line
from toolroll.cli.options import help_of
from toolroll.evaluation.run_config import json_object
from toolroll.rollout.runtime.event_loop import run

console = Output()

Env = Annotated[str, typer.Argument(help=help_of("env"))]
EnvArgs = Annotated[str | None, typer.Option(metavar="JSON", help=help_of("env_args"))]
Split = Annotated[str | None, typer.Option(help=help_of("split"))]


def new_env(
    name: Annotated[
        str, typer.Argument(help="the new name: lowercase letters, digits and hyphens")
    ],
    at: Annotated[Path, typer.Option(help="the folder to write into")] = Path(),
) -> None:
    """Write a small working environment and its test, as a starting point for your own.

    Example: toolroll new-env my-bench
    """
    from toolroll.cli.new_env import new_env as write_file

    file = write_file(name, at)
    test = file.with_name(f"test_{file.name}")
    print_line(console, f"Wrote {file} and {test}. Next:")
    print_line(console, f"  toolroll check-env {file}:env")
    print_line(console, f"  pip install pytest && python -m pytest {test}")
    print_line(console, f"  toolroll run {file}:env --engine http://127.0.0.1:30000 --model MODEL")


def check_env(
    env: Env,
    env_args: EnvArgs = None,
    split: Split = None,
    tasks: Annotated[
        str | None, typer.Option(help="which tasks: 3, 0-9 or 0-4,7; default: the first 20")
    ] = None,
) -> None:
    """Check an environment before you play it. Exit with 1 if a check failed.

    It checks tasks, seeds, reference actions, doing nothing, argument types and wrong calls.

    Example: toolroll check-env env.py:env
    """
    from toolroll.evaluation.environment_check import check
    from toolroll.rollout.runs.registry import choose_tasks, load_environment

    factory = load_environment(env, json_object(env_args, "--env-args"))
    chosen = choose_tasks(factory, split, tasks)
    results = run(check(factory, chosen if tasks is not None else chosen[:20]))
    print_line(console, f"{factory.name}:")
    for result in results:
        print_line(console, f"  {result.status}: {result.name}: {result.detail}")
    if any(result.status == "failed" for result in results):
        raise typer.Exit(1)
