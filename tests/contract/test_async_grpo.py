"""TRL's own `AsyncGRPOTrainer` (1.16.0) on the CPU, with our rollout worker and weight transfer.

`tests/support/async_grpo.py` has the stand-ins for what needs a GPU.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.async_grpo import config_of, on_a_cpu, trainer_of
from support.gradients import (
    PLAYED,
    World,
    assert_equal,
    gradient,
    per_token,
    play_group,
    policy_of,
    read,
    step,
    terms,
)

from toolroll.rollout.types import Status
from toolroll.trainers.trl.rows import Row, group_rows

torch = pytest.importorskip("torch", reason="TRL's trainer needs torch for the CPU")


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_a_cpu():
        yield


def test_a_row_has_the_fields_of_trls_sample() -> None:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    theirs = {one.name for one in dataclasses.fields(RolloutSample)}
    assert {one.name for one in dataclasses.fields(Row)} == theirs


# --- the loss -------------------------------------------------------------------------------------

RAMBLES = (0, 1)
"""The episode that is truncated, as (task, sample)."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return asyncio.run(play_group(tmp_path_factory.mktemp("gradients"), rambles=RAMBLES))


def trl_gradient(world: World, folder: Path, rows: list[Row]) -> dict[str, Any]:
    """The gradient of one micro-batch of `rows`, through TRL's loader, tree and loss."""
    config = config_of(
        folder, "http://127.0.0.1:1", token_budget=-1, per_device_train_batch_size=len(rows),
        model_init_kwargs={"dtype": torch.float64},
    )  # fmt: skip
    training = trainer_of(folder, config, ["0"], model=world.folder)
    training.rollout_worker.rollout_buffer = training.rollout_queue = queue.Queue()
    for row in [*rows, *rows]:  # the loader is one micro-batch ahead
        training.rollout_queue.put(row)
    batch = next(iter(training.get_train_dataloader()))
    training.current_gradient_accumulation_steps = 1
    training.model.train()
    training.training_step(training.model, batch, None)
    assert batch["input_ids"].numel() < sum(len(row.input_ids) for row in rows), "no tree"
    return gradient(training.model)


def rows_of(world: World) -> list[Row]:
    return [row for task in PLAYED for row in group_rows(world.group(task), task)]


def expected(world: World) -> dict[str, Any]:
    """The same by hand, one sequence at a time, out of the episode file alone."""
    episodes = read(world.file)
    groups = [[one for one in episodes if one.task == task] for task in PLAYED]
    tokens = sum(one.tokens for one in episodes)
    losses = terms(groups, per_token(tokens), eps=0.0, ddof=0)
    return step(policy_of(world.folder), losses)


def test_the_gradient_of_its_loss(world: World, tmp_path: Path) -> None:
    """With forked, aborted and truncated episodes, and clipped ratios."""
    statuses = {result.status for task in PLAYED for result in world.group(task)}
    assert statuses == set(Status)
    rows = rows_of(world)
    assert len(rows) > 5, "no episode forked"
    assert_equal(trl_gradient(world, tmp_path, rows), expected(world))


def test_a_mask_that_is_one_token_off_is_noticed(world: World, tmp_path: Path) -> None:
    rows = rows_of(world)
    for row in rows:
        row.completion_mask = np.roll(row.completion_mask, 1)
        row.completion_mask[0] = 0
    with pytest.raises(AssertionError, match="of the largest gradient"):
        assert_equal(trl_gradient(world, tmp_path, rows), expected(world))
