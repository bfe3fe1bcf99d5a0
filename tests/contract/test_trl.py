"""TRL's own `GRPOTrainer` and `AsyncGRPOTrainer` (1.16.0) on the CPU, with our rollout function and
worker, and our weight transfer.

`tests/support/async_grpo.py` has the stand-ins for what needs a GPU.
"""

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
from support.async_grpo import PROMPTS, by_length, config_of, desk_engine, on_a_cpu, trainer_of
from support.gradients import PLAYED, World, gradient, per_token, play_group, terms
from support.patience import PATIENCE
from support.processes import get_json
from support.trl_toy import InProcess, grpo_trainer

from toolroll.rollout.errors import EngineError, RolloutError
from toolroll.rollout.types import Status
from toolroll.testing import load_embedded_tokenizer
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl import async_rollouts, make_rollout_func
from toolroll.trainers.trl.rows import Row, group_rows
from toolroll.trainers.trl.weights import DiskTransfer
from toolroll.trainers.trl.worker import RolloutWorker

torch = pytest.importorskip("torch", reason="TRL's trainer needs torch for the CPU")


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_a_cpu():
        yield


def test_our_parts_are_those_of_trls_protocols() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer as theirs
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    fields = [{field.name for field in dataclasses.fields(kind)} for kind in (Row, RolloutSample)]
    assert fields[0] == fields[1]
    for protocol, ours in (
        (theirs.RolloutWorkerProtocol, RolloutWorker),
        (theirs.WeightTransferProtocol, DiskTransfer),
    ):
        names = [name for name in vars(protocol) if not name.startswith("_")]
        assert len(names) >= 4
        for name in names:
            signature, own = (inspect.signature(getattr(kind, name)) for kind in (protocol, ours))
            assert list(signature.parameters) == list(own.parameters)


def example(file: str) -> dict[str, Any]:
    return run_path(str(Path(__file__).parents[2] / "examples" / "trl_desk" / file))


def test_the_examples_are_what_trl_takes(tmp_path: Path) -> None:
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
    from trl.trainer.grpo_config import GRPOConfig

    own = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    train = example("train.py")
    assert GRPOConfig(**{**train["CONFIG"], **own}).num_generations == 8
    assert [row["prompt"] for row in train["rows"]()] == [str(index) for index in range(33)]
    assert train["rollout_func"]().settings.env == "desk"
    config = AsyncGRPOConfig(**{**example("train_async.py")["CONFIG"], **own})
    parts = async_rollouts(config, {"env": "desk"}, model="m", prompts=["0"], weights=tmp_path)
    assert parts["rollout_worker"]._job.settings.context_length == config.token_budget
    assert set(parts) <= set(inspect.signature(AsyncGRPOTrainer).parameters)


# --- training -------------------------------------------------------------------------------------


def test_the_mean_reward_of_a_two_armed_task_rises(tmp_path: Path) -> None:
    rollout = make_rollout_func(
        EpisodeSettings(env="support.trl_toy:Arms", on_length="continue", verify="off"),
        engine=InProcess,
    )
    training = grpo_trainer(
        tmp_path, rollout, ["0"] * 16, max_steps=20, max_completion_length=1, learning_rate=2e-2,
        num_generations=16, per_device_train_batch_size=16, lr_scheduler_type="constant",
    )  # fmt: skip
    training.train()
    rollout.close()
    rewards = logs(training, "reward")
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.2, rewards


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
def test_a_killed_engine_ends_training(tmp_path: Path, moment: str, record_property: Any) -> None:
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


def test_the_gradient_of_its_loss(world: World, tmp_path: Path) -> None:
    """With forked, aborted and truncated episodes, and clipped ratios."""
    statuses = {result.status for task in PLAYED for result in world.group(task)}
    assert statuses == set(Status)
    rows = [row for task in PLAYED for row in group_rows(world.group(task), task)]
    assert len(rows) > 5, "no episode forked"
    losses = terms(world.played, per_token(world.trained), eps=0.0, ddof=0)
    world.check(trl_gradient(world, tmp_path, rows), losses)
    # a mask that is one token off is noticed
    for row in rows:
        row.completion_mask = np.roll(row.completion_mask, 1)
        row.completion_mask[0] = 0
    with pytest.raises(AssertionError, match="of the largest gradient"):
        world.check(trl_gradient(world, tmp_path, rows), losses)


def test_trl_refuses_attention_sinks(tmp_path: Path) -> None:
    """The tree's attention would leave them out."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=4128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    load_embedded_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attention sinks"):
        trainer_of(tmp_path, config_of(tmp_path, "http://127.0.0.1:1"), ["0"], model=tmp_path)
