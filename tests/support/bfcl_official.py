"""Judge BFCL trajectories with the official checker, in a separate program, because that checker
keeps every world in memory.

Reads one JSON object per line, `{"category", "index", "turns": [[call as Python text]]}`, and
writes one line, `true` or `false`, for each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def official_verdicts(trajectories: Sequence[dict[str, Any]], folder: Path) -> list[bool]:
    """The official verdicts on `trajectories`; `folder` gets what the checker writes."""
    lines = "\n".join(json.dumps(trajectory) for trajectory in trajectories)
    environment = {**os.environ, "BFCL_PROJECT_ROOT": str(folder)}
    run = subprocess.run(
        [sys.executable, __file__], input=lines, capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def _main() -> None:
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    from toolroll.environments.bfcl.data import BfclData

    parts = ("base", "miss_func", "miss_param", "long_context")
    data = {name: BfclData(name) for name in (f"multi_turn_{part}" for part in parts)}
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        found = data[asked["category"]]
        entry = dict(found.entries[asked["index"]])
        # A separate name for each trajectory: worlds are cached by (model, entry), and a used world
        # leads to wrong verdicts.
        decoded = [[[call] for call in turn] for turn in asked["turns"]]
        truths = [list(turn) for turn in found.ground_truths[entry["id"]]]
        result = multi_turn_checker(decoded, truths, entry, asked["category"], f"model{number}")
        sys.stdout.write(json.dumps(bool(result["valid"])) + "\n")


if __name__ == "__main__":
    _main()
