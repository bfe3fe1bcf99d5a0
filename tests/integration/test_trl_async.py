"""TRL's `AsyncGRPOTrainer` trains from the real SGLang with changing weights."""

import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.async_grpo import by_length, config_of, on_a_cpu, trainer_of
from support.gradients import logprobs_of, policy_of
from support.processes import get_json
from support.servers import sglang_server
from support.tiny_model import tiny_model

from toolroll.trainers.trl.rows import Row

STEPS, BATCH = 5, 4
IDLE_SECONDS = 20.0


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_a_cpu():
        yield


@cache
def checkpoint(folder: Path) -> Any:
    return policy_of(folder).float()


def logprobs_by(folder: Path, row: Row) -> npt.NDArray[np.float32]:
    """The logprob of each token of a row but the first, by the checkpoint in `folder`."""
    found: npt.NDArray[np.float32] = (
        logprobs_of(checkpoint(folder), row.input_ids.tolist()).detach().numpy()
    )
    return found


def until_turns_are_sampled(url: str) -> None:
    """Wait until the engine has sampled some tokens of its running turns, or has been idle for a
    while: they may have ended before they were seen."""
    idle_since, first = time.monotonic(), None
    while time.monotonic() < idle_since + IDLE_SECONDS:
        [load] = get_json(f"{url}/v1/loads")[1]["loads"]
        used = load["num_used_tokens"]
        if not load["num_running_reqs"]:
            first = None
        elif first is None or used < first:  # a turn has begun
            idle_since, first = time.monotonic(), used
        elif used > first + 20:
            return
        time.sleep(0.005)


def test_each_token_has_the_logprob_of_its_weights(tmp_path: Path, log_folder: Path) -> None:
    settings, gate = by_length(tmp_path)
    rows, synced = list[Row](), 0
    with sglang_server(log_folder, name="sglang-async") as server:
        config = config_of(
            tmp_path, server.url, max_steps=STEPS, learning_rate=3e-2, temperature=1.0,
            max_completion_length=60, num_generations=2, per_device_train_batch_size=BATCH,
            weight_sync_steps=100, queue_maxsize=8,
        )  # fmt: skip
        training: Any = trainer_of(
            tmp_path, config, ["0", "1"], model=tiny_model(), settings=settings
        )
        take, send = training.rollout_queue.get, training.weight_transfer.send_weights

        def get(**named: Any) -> Row:
            """Take a row. After each step, the weights are updated when a whole batch has been
            taken. The groups that begin then wait at the gate until this process looks at their
            turns."""
            nonlocal synced
            step = training.state.global_step
            updates = step > synced and len(rows) % BATCH == BATCH - 1
            while updates and not training.rollout_queue.qsize():
                time.sleep(0.005)
            if updates:
                gate.unlink()
            rows.append(take(**named))
            if updates:
                gate.touch()
                until_turns_are_sampled(server.url)
                synced = step
                training._sync_weight()
            return rows[-1]

        def send_and_keep(iterator: Any) -> None:
            send(iterator)
            version = str(training.model_version + 1)
            shutil.copytree(tmp_path / "weights", tmp_path / "versions" / version)

        training.rollout_queue.get, training.weight_transfer.send_weights = get, send_and_keep
        training.train()
    assert training.state.global_step == STEPS
    within = 0
    for row in rows:
        trained = np.flatnonzero(row.completion_mask[1:]).tolist()
        old, now, before = row.old_log_probs[1:][trained], row.model_version, -1
        error = np.abs(logprobs_by(tmp_path / "versions" / str(now), row)[trained] - old)
        assert error[0] < 1e-4, "the first token is of the row's version"
        for at, position in enumerate(trained):
            while error[at] > 1e-4:
                now += 1
                within += position == before + 1
                assert now <= training.model_version, "no weights gave this logprob"
                error = np.abs(logprobs_by(tmp_path / "versions" / str(now), row)[trained] - old)
            before = position
    assert within, "no update came within a turn"
    assert len({row.model_version for row in rows}) > 1
