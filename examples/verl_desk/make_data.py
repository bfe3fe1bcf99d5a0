"""Write the desk's tasks in verl's format: `python make_data.py desk.parquet`."""

import sys
from typing import Any

from toolroll import load_environment


def rows() -> list[dict[str, Any]]:
    """Return one row per task. `extra_info` names the task. verl requires the other columns."""
    return [
        {
            "data_source": "toolroll/desk",
            "prompt": [{"role": "user", "content": f"desk {task.id}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": task.index, "env": "desk", "split": "test"},
        }
        for task in load_environment("desk").tasks("test")
    ]


if __name__ == "__main__":
    import pandas

    pandas.DataFrame(rows()).to_parquet(sys.argv[1])
