"""slime's loop with a program as the agent: trials become samples."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import slime_mirror
from support.program_trials import command_of, processes_of, refusal, replies, write_task
from support.slime_mirror import DataSource, train_data
from support.slime_trainer import SAMPLING, serving

from toolroll.testing import Fault, PolicyRequest
from toolroll.trainers.slime import generate_rollout
from toolroll.trainers.slime.generation import play_sample
from toolroll.trainers.slime.training import close_rollout

MARKER = "98765432"


pytestmark = pytest.mark.skipif(bool(refusal()), reason=f"needs user namespaces: {refusal()}")


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """slime's arguments for trials of a task. What a rollout leaves open is closed."""
    slime_mirror.install(monkeypatch)
    write_task(tmp_path)
    where = {"toolroll_env": "harbor", "toolroll_env_args": {"path": str(tmp_path)}}
    yield {**where, "toolroll_agent": "program", "toolroll_command": command_of()}
    close_rollout()


async def test_a_failed_group_of_trials_is_replaced(trials: dict[str, Any]) -> None:

    def policy(request: PolicyRequest) -> str:
        number = request.routing_key.split("-")[1]
        turn = request.text.count("<|turn|>assistant") - 1
        # in each group, the second sample does nothing
        return "I cannot." if number == "1" else replies()[turn]

    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(status=500) if request.routing_key.startswith("1-0-") else None

    async with serving(policy, faults=faults) as (engine, args):
        vars(args).update(trials, toolroll_reruns=0, over_sampling_batch_size=1)
        args.toolroll_command = f"setsid sleep {MARKER} & {command_of()}"
        source = DataSource(slime_mirror.Sample, [{"prompt": 0}], n=2)
        output = await asyncio.to_thread(generate_rollout, args, 0, source)
    groups = [[sample.group_index for sample in group] for group in output.samples]
    assert groups == [[0, 0], [2, 2]], "the group with an aborted trial is replaced"
    assert [[sample.reward for sample in group] for group in output.samples] == [[1.0, 0.0]] * 2
    samples = [sample for group in output.samples for sample in group]
    train_data(samples)
    sampled = [
        len(entry.output_ids or ())
        for entry in engine.log
        if entry.status == 200 and not entry.routing_key.startswith("1-")
    ]
    assert sum(sum(sample.loss_mask) for sample in samples) == sum(sampled)
    assert output.metrics["toolroll/aborted"] == 1.0
    assert processes_of(f"sleep {MARKER}") == []


async def test_a_stop_is_only_for_the_trials_of_its_rollout(trials: dict[str, Any]) -> None:
    """All trials share one server, which the first one starts."""
    turns: list[int] = []

    def policy(request: PolicyRequest) -> str:
        turns.append(request.text.count("<|turn|>assistant") - 1)
        return replies()[turns[-1]]

    async with serving(policy) as (_, args):
        vars(args).update(trials)

        async def trial(*, stops: bool) -> tuple[str, float | None]:
            """The status and the reward. The rollout stops after the first turn if it `stops`."""
            turns.clear()
            sample = slime_mirror.Sample(prompt=0, group_index=0, index=0)
            [played] = await play_sample(
                args, sample, SAMPLING, evaluation=False, stopped=lambda: stops and bool(turns)
            )
            return played.status.name, played.reward

        assert (await trial(stops=True), turns) == (("ABORTED", None), [0])
        assert (await trial(stops=False), turns) == (("COMPLETED", 1.0), [0, 1])
        assert (await trial(stops=True), turns) == (("ABORTED", None), [0])
