"""`toolroll tasks`: a benchmark's tasks as a file that a trainer reads its prompts from, one JSON
object a line.

Invariants: `index` is the task's place in its split, `metadata` says which environment and split
that is; the file is written as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.environment_file import absolute_target
from toolroll.rollout.runs.registry import choose_tasks, load_environment
from toolroll.rollout.runs.run_directory import make_folder
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.types import Task


def task_lines(
    env: str,
    split: str | None,
    wanted: str | None,
    env_args: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """The lines for the tasks of `env` that `split` (default: the first) and `wanted` ("0-9",
    "3,5") name.

    Raises `UsageError` for an unknown environment, split or task, and where what the environment
    needs is not installed.
    """
    factory = load_environment(env, env_args)
    chosen = split or factory.splits[0]
    return [
        orjson.dumps(task_row(absolute_target(env), chosen, task))
        for task in choose_tasks(factory, chosen, wanted)
    ]


def task_row(env: str, split: str, task: Task) -> dict[str, Any]:
    """One task: its index, and as metadata the benchmark's own data, with what identifies the
    task beside them.
    """
    return {
        "index": task.index,
        "metadata": {**task.data, "env": env, "split": split, "task_id": task.id},
    }


def write_lines(lines: Iterable[bytes], out: Path) -> None:
    """Write `lines` to the file `out`, and make its folder."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder: name the file")
    make_folder(out.parent)
    with written_whole(out) as file:
        file.writelines(line + b"\n" for line in lines)
