"""slime's own rollout loops play our `generate`, with slime installed (`make test-peers`)."""

import asyncio
import importlib
import json
import random
from argparse import Namespace
from typing import Any

import pytest
from support.slime_mirror import DataSource, flattened, train_data
from support.slime_trainer import (
    Environments,
    every_sampled_token_is_as_served,
    play,
    real_slime,
    reference_lines,
    says,
    serving,
)

from toolroll.testing import EmbeddedEngine, Fault, PolicyRequest, Reply, embedded_tokenizer_path
from toolroll.trainers.slime import keep_group
from toolroll.trainers.slime.generation import player

pytestmark = pytest.mark.peers


def total(samples: list[Any], metric: str) -> int:
    return sum(sample.metadata["toolroll"]["metrics"][metric] for sample in samples)


def task_line(request: PolicyRequest) -> str:
    """A line of the reference of the task that the session names: g<group>/<position>."""
    return reference_lines(int(request.routing_key[1:].split("/")[0]) % 3)[request.call]


class Groups(DataSource):
    """Groups of the tasks 0 to 2 in turn. Each sample has a session of its own."""

    def __init__(self, sample_type: Any) -> None:
        super().__init__(sample_type, [{"prompt": task} for task in range(3)], n=4)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for group in groups:
            for position, sample in enumerate(group):
                sample.session_id = f"g{group[0].group_index}/{position}"
        return groups


def set_arguments(args: Namespace, **others: Any) -> None:
    vars(args).update(
        hf_checkpoint=str(embedded_tokenizer_path()),
        custom_generate_function_path="toolroll.trainers.slime.generate",
        custom_rm_path=None,
        mask_offpolicy_in_partial_rollout=False,
        partial_rollout=False,
        rollout_global_dataset=True,
        rollout_skip_special_tokens=False,
        sglang_dp_size=None,
        use_distributed_post=False,
        n_samples_per_prompt=4,
    )
    vars(args).update(others)


def check_that_nothing_was_lost(samples: list[Any], engine: EmbeddedEngine) -> None:
    """That each is what it would have been without aborts is in `test_slime_parking.py`."""
    train_data(samples)
    assert {sample.reward for sample in samples} == {1.0}
    every_sampled_token_is_as_served([Namespace(samples=[samples])], engine)


async def test_slime_s_own_checks_accept_our_samples() -> None:
    sample_type = real_slime("slime.utils.types").Sample
    async with serving() as (_, args):
        sample = await play(args, sample_type(prompt=0, index=0))
    sample._validate_response_metadata_lengths()
    assert sample_type.from_dict(json.loads(json.dumps(sample.to_dict()))).tokens == sample.tokens
    # what slime adds to it later still fits
    sample.append_response_tokens(tokens=[1, 2], trainable=False)


async def test_slime_s_groups_are_played(slime_loop: Any) -> None:
    """Groups as slime begins them, with a weight update in the middle of one, and what it makes
    of an aborted episode.
    """
    sample_type = real_slime("slime.utils.types").Sample
    filters = real_slime("slime.rollout.filter_hub.base_types")

    def policy(request: PolicyRequest) -> str | Reply:
        gives_up = request.routing_key[-1] in "13"
        return "I cannot help you. Goodbye." if gives_up else says()(request)

    def faults(request: PolicyRequest) -> Fault | None:
        if request.routing_key == "g1-3":
            return Fault(status=400)
        updated = request.routing_key == "g0-0" and request.call == 1
        return Fault(weight_version="2", switch_after=4) if updated else None

    async with serving(policy, faults=faults, weight_version="1") as (engine, args):
        set_arguments(args)
        groups = [
            [sample_type(prompt=0, index=4 * g + i, session_id=f"g{g}-{i}") for i in range(4)]
            for g in range(2)
        ]
        params = slime_loop.GenerateState(args).sampling_params
        first, second = await asyncio.gather(
            *(slime_loop.generate_and_rm_group(args, group, dict(params)) for group in groups)
        )
    assert [sample.reward for sample in first] == [1.0, 0.0, 1.0, 0.0]
    assert first[0].weight_versions[:3] == ["1", "1", "2"]
    train_data(list(first))
    aborted = second[3]
    assert aborted.status is sample_type.Status.ABORTED and aborted.reward is None
    assert not any(aborted.loss_mask)
    assert filters.call_dynamic_filter(keep_group, args, list(first)).keep
    assert not filters.call_dynamic_filter(keep_group, args, list(second)).keep
    every_sampled_token_is_as_served([Namespace(samples=[list(first)])], engine)


async def test_slime_s_partial_rollout_loses_nothing(
    slime_loop: Any, monkeypatch: pytest.MonkeyPatch, environments: Environments
) -> None:
    """Four rollouts of two groups in slime's own loop. In each, one group more has begun, and its
    samples are cut at random: those of group 2 twice.
    """
    sample_type = real_slime("slime.utils.types").Sample
    http = importlib.import_module("slime.utils.http_utils")
    monkeypatch.setattr(http, "_http_client", None)
    chance, never, number = random.Random(7), asyncio.Event(), 0
    held = {
        (rollout, f"g{group}/{position}"): (chance.choice(calls), chance.randrange(9))
        for rollout, group, calls in ((0, 2, (0, 1)), (1, 2, (2, 3)), (2, 6, (0, 1, 2)))
        for position in (0, 1, 3)
    }

    def policy(request: PolicyRequest) -> Reply:
        call, tokens = held.get((number, request.routing_key), (None, 0))
        hold = None if call != request.call else never
        return Reply(task_line(request), hold=hold, hold_after=tokens)

    groups: list[Any] = []
    async with serving(policy, weight_version="0") as (engine, args):
        set_arguments(args, partial_rollout=True)
        http.init_http_client(args)
        source = Groups(sample_type)
        while number < 4:
            args.over_sampling_batch_size = 2 if number == 3 else 3
            engine.set_weight_version(str(number))
            output, left = await slime_loop.generate_rollout_async(args, number, source.get_samples)
            source.add_samples(left)
            groups += output.samples
            number += 1
        assert await player(args).parked_metrics() == {"toolroll/parked": 0.0}
        await http._http_client.aclose()
    samples = flattened(groups)
    assert (total(samples, "resumes"), total(samples, "restarts")) == (len(held), 0)
    assert len(environments.opened) == len(environments.closed) == len(samples)
    check_that_nothing_was_lost(samples, engine)


async def test_slime_s_async_rollout_is_whole(slime_loop: Any, environments: Environments) -> None:
    """slime puts an aborted group back at once. Each session is aborted at random."""
    sample_type = real_slime("slime.utils.types").Sample
    worker_module = importlib.import_module("slime.rollout.fully_async_rollout")
    chance = random.Random(11)

    def faults(request: PolicyRequest) -> Fault | None:
        engine.set_weight_version(str(request.index // 8))
        return Fault(abort_after=chance.randrange(9)) if chance.random() < 0.3 else None

    path = f"{worker_module.__name__}.generate_rollout_fully_async"
    async with serving(task_line, faults=faults, weight_version="0") as (engine, args):
        set_arguments(args, rollout_function_path=path)
        worker = worker_module.AsyncRolloutWorker(args, Groups(sample_type), concurrency=2)
        worker.poll_interval = 0
        running, groups = asyncio.create_task(worker._loop()), list[Any]()
        while len(groups) < 6:
            groups += [group for _, group in worker.get_completed_groups()]
            await asyncio.sleep(0)
        worker.running = False
        await running
        groups += [group for _, group in worker.get_completed_groups()]
    samples = flattened(groups)
    assert total(samples, "resumes") > len(samples) and total(samples, "restarts") == 0
    check_that_nothing_was_lost(samples, engine)
