"""TRL's own `AsyncGRPOTrainer` (1.16.0) on the CPU, with our rollout worker and weight transfer.

`tests/support/async_grpo.py` has the stand-ins for what needs a GPU.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from support.async_grpo import (
    PROMPTS,
    by_length,
    config_of,
    desk_engine,
    on_a_cpu,
    trainer_of,
)
from support.gradients import (
    PLAYED,
    World,
    assert_equal,
    gradient,
    groups,
    per_token,
    play_group,
    policy_of,
    step,
    terms,
    trained,
)
from support.patience import PATIENCE
from support.processes import get_json

from toolroll.rollout.errors import EngineError, RolloutError
from toolroll.rollout.types import Status
from toolroll.testing import load_embedded_tokenizer
from toolroll.trainers.trl import async_rollouts
from toolroll.trainers.trl.rows import Row, group_rows
from toolroll.trainers.trl.weights import DiskTransfer
from toolroll.trainers.trl.worker import RolloutWorker

torch = pytest.importorskip("torch", reason="TRL's trainer needs torch for the CPU")


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_a_cpu():
        yield


def test_a_row_has_the_fields_of_trls_sample() -> None:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    theirs = {one.name for one in dataclasses.fields(RolloutSample)}
    assert {one.name for one in dataclasses.fields(Row)} == theirs


def test_our_parts_have_the_methods_of_trls_protocols() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer as theirs

    pairs = {
        theirs.RolloutWorkerProtocol: RolloutWorker,
        theirs.WeightTransferProtocol: DiskTransfer,
    }
    for protocol, ours in pairs.items():
        names = [name for name in vars(protocol) if not name.startswith("_")]
        assert len(names) >= 4
        for name in names:
            asked, taken = (inspect.signature(getattr(one, name)) for one in (protocol, ours))
            assert list(asked.parameters) == list(taken.parameters)


def test_trl_refuses_attention_sinks(tmp_path: Path) -> None:
    """The tree's attention would leave them out."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = GptOssForCausalLM(GptOssConfig(vocab_size=4128, **sizes, **heads, **experts))
    model.save_pretrained(tmp_path)
    load_embedded_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attention sinks"):
        trainer_of(tmp_path, config_of(tmp_path, "http://127.0.0.1:1"), ["0"], model=tmp_path)


def test_the_example_is_what_trl_takes(tmp_path: Path) -> None:
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    file = Path(__file__).parents[2] / "examples" / "trl_desk" / "train_async.py"
    own = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    config = AsyncGRPOConfig(**{**run_path(str(file))["CONFIG"], **own})
    parts = async_rollouts(config, {"env": "desk"}, model="m", prompts=["0"], weights=tmp_path)
    assert parts["rollout_worker"]._job.settings.context_length == config.token_budget
    assert set(parts) <= set(inspect.signature(AsyncGRPOTrainer).parameters)


# --- training -------------------------------------------------------------------------------------


def logs(training: Any, name: str) -> list[Any]:
    return [entry[name] for entry in training.state.log_history if name in entry]


def taken(training: Any) -> list[Row]:
    """The rows that the trainer takes from now on."""
    rows: list[Row] = []
    take = training.rollout_queue.get

    def get(**named: Any) -> Row:
        rows.append(take(**named))
        return rows[-1]

    training.rollout_queue.get = get
    return rows


def test_each_step_is_followed_by_new_weights(tmp_path: Path) -> None:
    settings, _ = by_length(tmp_path)
    with desk_engine(tmp_path) as server:
        config = config_of(tmp_path, server.url, max_steps=5, max_staleness=1)
        training = trainer_of(tmp_path, config, ["0", "1"], settings=settings)
        threads, rows = set(threading.enumerate()), taken(training)
        before = {name: one.clone() for name, one in training.model.named_parameters()}
        training.train()
        served = get_json(f"{server.url}/model_info")[1]["weight_version"]
    assert training.state.global_step == 5 and served == str(training.model_version) == "6"
    after = dict(training.model.named_parameters())
    assert any(not torch.equal(before[name], one) for name, one in after.items())
    assert max(logs(training, "grad_norm")) > 0
    # the engine's logprobs are those of the weights that the trainer gave it
    assert abs(logs(training, "ratio")[0] - 1) < 1e-4 and abs(logs(training, "kl")[0]) < 1e-6
    groups, versions = [row.group_id for row in rows], {row.model_version for row in rows}
    assert groups == sorted(groups) and set(groups) == set(range(max(groups) + 1))
    assert min(versions) == 1 and len(versions) > 1
    assert sum(logs(training, "toolroll/handed_over_rows_total")) > 0
    assert 0 < min(logs(training, "reward")) <= 1
    assert max(logs(training, "sample/staleness_max")) <= 1
    assert not logs(training, "sample/dropped_stale_total")
    nothing_is_left(threads)


def nothing_is_left(threads: set[threading.Thread]) -> None:
    """Beside TRL's own thread for traces."""
    left = {one.name for one in set(threading.enumerate()) - threads}
    assert left <= {"rollout-trace-logger"}
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("moment", ["in a step", "before the first row", "later"])
def test_a_killed_engine_ends_the_training(
    tmp_path: Path, moment: str, record_property: Callable[[str, object], None]
) -> None:
    killed: list[float] = []

    with desk_engine(tmp_path) as server:
        # without syncs after the first, only the waiting trainer can notice it
        syncs = 1 if moment == "in a step" else 1000
        config = config_of(tmp_path, server.url, max_steps=1000, weight_sync_steps=syncs)
        training = trainer_of(tmp_path, config, PROMPTS)
        worker = training.rollout_worker
        threads = set(threading.enumerate())

        def then(call: Callable[..., Any], after: int = 0) -> Callable[..., Any]:
            """The same call. The engine is killed before the first, or after some calls."""
            calls = count()

            def called(*given: Any, **named: Any) -> Any:
                if next(calls) == after:
                    server.process.kill()
                    killed.append(time.monotonic())
                return call(*given, **named)

            return called

        if moment == "in a step":
            training.training_step = then(training.training_step)
        elif moment == "later":
            training.rollout_queue.get = then(training.rollout_queue.get, 20)
        else:
            worker.start = then(worker.start)
        with pytest.raises((EngineError, RolloutError), match=r"engine|pause_generation"):
            training.train()
    seconds = time.monotonic() - killed[0]
    record_property("seconds", seconds)
    assert seconds < 60
    nothing_is_left(threads)


def test_a_killed_trainer_resumes_at_its_prompt(tmp_path: Path) -> None:
    with desk_engine(tmp_path) as server:
        command = [sys.executable, "-m", "support.async_grpo", str(tmp_path), server.url]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with (tmp_path / "trainer.log").open("wb") as log:
            trainer = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        states = [tmp_path / f"out/checkpoint-{step}/trainer_state.json" for step in (2, 3)]
        try:
            until(states[1].is_file, trainer)
            listed = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text()
        finally:
            trainer.kill()
            trainer.wait()
        children = [Path(f"/proc/{child}") for child in listed.split()]
        assert children
        until(lambda: not any(child.exists() for child in children))

        first, second = (json.loads(state.read_text())["stateful_callbacks"] for state in states)
        next_group = second["toolroll"]["next_group"]
        assert 0 <= first["toolroll"]["next_group"] < next_group < 2 * 4 * 3
        config = config_of(tmp_path, server.url, max_steps=4)
        training = trainer_of(tmp_path, config, PROMPTS)
        rows = taken(training)
        training.train(resume_from_checkpoint=str(states[1].parent))
    assert training.state.global_step == 4
    groups = [row.group_id for row in rows]
    assert groups[0] == next_group and groups == sorted(groups)


def until(condition: Callable[[], bool], process: Any = None) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        assert process is None or process.poll() is None
        time.sleep(0.1)


# --- the loss -------------------------------------------------------------------------------------

RAMBLES = (0, 1)
"""The episode that is truncated, as (task, sample)."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return asyncio.run(play_group(tmp_path_factory.mktemp("gradients"), rambles=RAMBLES))


def trl_gradient(world: World, folder: Path, rows: list[Row]) -> dict[str, Any]:
    """The gradient of one micro-batch of `rows`, through TRL's loader, tree and loss."""
    config = config_of(
        folder, "http://127.0.0.1:1", temperature=1.0, per_device_train_batch_size=len(rows),
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
    losses = terms(groups(world), per_token(trained(world)), eps=0.0, ddof=0)
    return step(policy_of(world.folder), losses)


def test_the_gradient_of_its_loss(world: World, tmp_path: Path) -> None:
    """With forked, aborted and truncated episodes, and clipped ratios."""
    statuses = {result.status for task in PLAYED for result in world.group(task)}
    assert statuses == set(Status)
    rows = rows_of(world)
    assert len(rows) > 5, "no episode forked"
    assert_equal(trl_gradient(world, tmp_path, rows), expected(world))
    # a mask that is one token off is noticed
    for row in rows:
        row.completion_mask = np.roll(row.completion_mask, 1)
        row.completion_mask[0] = 0
    with pytest.raises(AssertionError, match="of the largest gradient"):
        assert_equal(trl_gradient(world, tmp_path, rows), expected(world))
