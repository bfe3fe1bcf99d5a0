"""`toolroll tasks`: writes an environment's tasks as JSON lines, as prompt data for a trainer.

Invariants:

- `index` is the task's position in its split.
- `metadata` names the environment and the split.
- Either the whole file is written, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from toolroll.rollout.environment import Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import choose_tasks, load_environment
from toolroll.rollout.runs.run_directory import make_folder
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.runtime.targets import absolute_target


def task_lines(
    env: str,
    split: str | None,
    numbers: str | None,
    env_args: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """Return one line of JSON per task of `env` in `split` (default: the first split).

    `numbers` selects tasks, as in "0-9" or "3,5". None selects all. Raise `UsageError` if the
    environment, the split or a task is unknown, or if a package that the environment needs is not
    installed.
    """
    factory = load_environment(env, env_args)
    chosen = split or factory.splits[0]
    return [
        orjson.dumps(task_row(absolute_target(env), chosen, task))
        for task in choose_tasks(factory, chosen, numbers)
    ]


def task_row(env: str, split: str, task: Task) -> dict[str, Any]:
    """Return one task as a row: `index`, and `metadata` with the task's own data, the environment,
    the split and the task's id.
    """
    return {
        "index": task.index,
        "metadata": {**task.data, "env": env, "split": split, "task_id": task.id},
    }


def write_lines(lines: Iterable[bytes], out: Path) -> None:
    """Write `lines` to the file `out`. Create its folder if needed."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder: name the file")
    make_folder(out.parent)
    with written_whole(out) as file:
        file.writelines(line + b"\n" for line in lines)
