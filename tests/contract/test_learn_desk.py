"""The trainer of `examples/learn_desk`: it learns from what the engine recorded."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.learn_desk import teacher
from examples.learn_desk.batches import load_samples, samples_of, save_samples, to_batch
from examples.learn_desk.learn import Learner, Lessons
from examples.learn_desk.mistakes import MISTAKES, flaky_desk, forgetful_template
from examples.learn_desk.network import load_network, save_network, with_noise
from examples.learn_desk.play import play, play_references
from examples.learn_desk.tokenizer import FILES, load_tokenizer

from toolroll.environments.desk import DESK, reference
from toolroll.rollout.episode import Episode
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.runs.runner import session_id
from toolroll.rollout.types import Status
from toolroll.testing import load_engine

MODEL = desk_model_path()
torch.set_num_threads(1)  # with more, it waits for the other processes of the tests


@pytest.fixture(scope="module")
def unsure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise in its weights."""
    folder = tmp_path_factory.mktemp("unsure")
    save_network(with_noise(load_network(MODEL)), folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    for name in FILES:
        shutil.copy(MODEL / name, folder)


def test_the_teacher_has_a_reply_for_each_reference_action() -> None:
    for task in DESK.tasks("held-out")[:300]:
        assert len(teacher.replies(task)) == len(reference(task))


async def test_the_references_earn_one_and_are_saved(tmp_path: Path) -> None:
    samples = await play_references(MODEL, DESK.tasks("held-out")[:4])
    save_samples(samples, tmp_path / "references.npz")
    loaded = load_samples(tmp_path / "references.npz")
    assert len(loaded) == 4
    for one, other in zip(samples, loaded, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


async def test_three_steps_of_the_policy_gradient(tmp_path: Path, unsure: Path) -> None:
    """The gradients are finite and not zero, the logprobs agree, and the weights are replaced."""
    (tmp_path / "tokenizer").mkdir()
    copy_tokenizer(tmp_path / "tokenizer")
    lessons = Lessons(drills=0, imitation=0, reinforcement=3, groups=6, group=6)
    learner = Learner(tmp_path, 0, lessons, evaluated=4)
    learner.network.load_state_dict(load_network(unsure).state_dict())
    await learner.run()
    lines = [json.loads(text) for text in (learner.folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "agreement" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["versions"] for line in steps] == [["seed-0/0"], ["seed-0/1"], ["seed-0/2"]]
    for line in steps:
        assert line["agreement"]["tokens"] > 300
        assert line["agreement"]["largest"] < 1e-4
        assert line["agreement"]["mean"] < 5e-6
        assert np.isfinite(line["gradient"]) and line["gradient"] > 0
    again = Learner(tmp_path, 0, lessons, evaluated=4)
    await again.run()  # nothing is left to do
    assert len((learner.folder / "log.jsonl").read_text().splitlines()) == len(lines)
    for one, other in zip(learner.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(one, other)


async def played(folder: Path, tasks: int, **given: Any) -> tuple[list[Episode], list[Any]]:
    """The episodes of the first tasks, and the engine's log."""
    async with load_engine(folder) as engine:
        train = DESK.tasks("train")[:tasks]
        episodes = await play(engine.url, load_tokenizer(folder), train, **given)
    return list(episodes), list(engine.log)


async def test_failures_are_left_out_unless_they_are_graded(unsure: Path) -> None:
    episodes, _ = await played(unsure, 8, samples=8, make_desk=flaky_desk)
    aborted = [one for one in episodes if one.result.status is Status.ABORTED]
    assert aborted
    assert all(not samples_of(one.result) for one in aborted)
    MISTAKES["failures-are-reward-0"].batch(episodes, load_network(unsure), load_tokenizer(unsure))
    assert all(one.result.reward == 0.0 for one in aborted)
    sampled = [one for one in aborted if any(each.turns for each in one.result.trajectories)]
    assert sampled
    assert all(samples_of(one.result) for one in sampled)


async def test_forks_train_each_turn_once_unless_trained_twice(unsure: Path) -> None:
    episodes, log = await played(unsure, 12, samples=1, chat_template=forgetful_template())
    found = next(one for one in episodes if len(one.result.trajectories) > 1)
    forked, key = found.result, session_id(DESK.name, found.task_id, 0)
    once = sum(int(to_batch([one]).trained.sum()) for one in samples_of(forked))
    logged = [one for one in log if one.routing_key == key]
    assert once == sum(len(one.output_ids) for one in logged)
    MISTAKES["forks-trained-twice"].batch(episodes, load_network(unsure), load_tokenizer(unsure))
    twice = sum(int(to_batch([one]).trained.sum()) for one in samples_of(forked))
    assert twice == sum(turn.length for one in forked.trajectories for turn in one.turns) > once
