"""The playing process of TRL's asynchronous trainer ends with it, and raises in it."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.trl_mirror import an_async_config

from toolroll.rollout.errors import RolloutError
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, serve_in_thread
from toolroll.trainers.trl import async_rollouts


@contextmanager
def worker_at(folder: Path, **changes: Any) -> Iterator[Any]:
    """A worker that plays the desk's tasks."""
    tokenizer = load_embedded_tokenizer()
    embedded = EmbeddedEngine(tokenizer, lambda request: "Goodbye.", weight_version="1")
    with serve_in_thread(embedded) as engine:
        config = an_async_config(vllm_server_base_url=engine.url)
        settings = {"env": "desk", "verify": "off", **changes}
        parts = async_rollouts(
            config, settings, model="embedded", prompts=["0", "1"], weights=folder
        )
        worker = parts["rollout_worker"]
        before = set(threading.enumerate())
        try:
            yield worker
        finally:
            worker.stop()
        assert multiprocessing.active_children() == []
        assert set(threading.enumerate()) <= before


def test_a_process_plays_until_it_is_stopped(tmp_path: Path) -> None:
    with worker_at(tmp_path) as worker:
        worker.start()
        rows = [worker.rollout_buffer.get(timeout=60) for _ in range(4)]
        worker.check_health(60.0)
        assert [row.group_id for row in rows] == [0, 0, 1, 1]
        with pytest.raises(RolloutError, match="no turn was sampled for"):
            worker.check_health(-1.0)
        process = worker._process
        worker.stop()
        assert process.exitcode == 0
        worker.stop()


# The trainer loads it before it starts the process.
FAILS_IN_A_CHILD = """
import multiprocessing

from toolroll.environments.desk import DESK


def environment():
    if multiprocessing.parent_process() is not None:
        raise ValueError("no database in this process")
    return DESK
"""


def test_what_the_process_raises_is_raised_in_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(FAILS_IN_A_CHILD)
    with worker_at(tmp_path, env=f"{path}:environment") as worker:
        worker.start()
        worker._process.join(60)
        with pytest.raises(RolloutError, match="no database in this process"):
            worker.check_health(60.0)


def test_a_killed_process_is_noticed(tmp_path: Path) -> None:
    with worker_at(tmp_path) as worker:
        with pytest.raises(RolloutError, match="is not running"):
            worker.check_health(60.0)
        worker.start()
        worker.rollout_buffer.get(timeout=60)
        worker._process.kill()
        worker._process.join(60)
        with pytest.raises(RolloutError, match="exit status -9"):
            worker.check_health(60.0)
