"""The slime adapter with several processes: the same samples, whichever process dies. And with a
program as the agent, whose trials become samples."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import slime_mirror
from support.program_trials import command_of, processes_of, refusal, replies, write_task
from support.ray_processes import local_cluster, workers
from support.slime_mirror import DataSource, Sample, flattened, play_group, train_data
from support.slime_trainer import (
    SAMPLING,
    every_sampled_token_is_as_served,
    reference_lines,
    serving,
)

from toolroll.testing import Fault, PolicyRequest, Reply
from toolroll.trainers.slime import close_rollout, generate, generate_rollout
from toolroll.trainers.slime.generation import play_sample
from toolroll.trainers.slime.ray_player import RayPlayer

PROMPTS = [{"prompt": at} for at in range(4)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_cluster():
        yield


@pytest.fixture(autouse=True)
def slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    slime_mirror.install(monkeypatch)
    yield
    close_rollout()


def turn_of(request: PolicyRequest) -> int:
    """The number of the turn, also if the episode is played again in the same session."""
    return request.text.count("<|turn|>assistant") - 1


def says(request: PolicyRequest) -> str:
    """The reference of the task, but the odd samples give up after one turn."""
    group, at = map(int, request.routing_key.split("/"))
    lines = reference_lines(group % len(PROMPTS))
    turn = turn_of(request)
    return "Goodbye." if (at % 2 and turn) or turn >= len(lines) else lines[turn]


def told(samples: list[Sample]) -> list[tuple[Any, ...]]:
    """What is trained, and the group and place of each sample."""
    names = (
        "group_index index rollout_id session_id tokens loss_mask rollout_log_probs reward status "
        "weight_versions response remove_sample"
    )
    return [tuple(getattr(sample, name) for name in names.split()) for sample in samples]


async def rollout(policy: Any, count: int, **settings: Any) -> tuple[list[list[Sample]], Any]:
    """The groups of one rollout in `count` processes, and its metrics."""
    async with serving(policy, weight_version="3") as (engine, args):
        vars(args).update(settings, toolroll_workers=count)
        args.rollout_batch_size = args.over_sampling_batch_size = len(PROMPTS)
        source = DataSource(Sample, PROMPTS, n=4)
        output = await asyncio.to_thread(generate_rollout, args, 0, source)
        every_sampled_token_is_as_served([output], engine)
        train_data(flattened(output.samples))
        close_rollout()
    return output.samples, output.metrics


_ALONE: list[tuple[list[list[Sample]], Any]] = []


async def alone() -> tuple[list[tuple[Any, ...]], Any]:
    """What is trained of one rollout in this process, and its metrics; played once."""
    if not _ALONE:
        _ALONE.append(await rollout(says, 1))
    [(groups, metrics)] = _ALONE
    return told(flattened(groups)), metrics


async def test_the_samples_are_those_of_one_loop() -> None:
    expected, metrics = await alone()
    spread, others = await rollout(says, 2)
    assert [len(group) for group in spread] == [4] * len(PROMPTS)
    assert told(flattened(spread)) == expected
    assert metrics | {"toolroll/env_seconds": 0} == others | {"toolroll/env_seconds": 0}


async def test_a_process_that_is_killed_loses_nothing() -> None:
    killed: list[int] = []

    def policy(request: PolicyRequest) -> str:
        if not killed and request.routing_key == "1/0" and turn_of(request) == 2:
            killed.extend(workers())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return says(request)

    spread, metrics = await rollout(policy, 2)
    assert len(killed) == 2
    assert told(flattened(spread)) == (await alone())[0]
    deaths = [made.metadata["toolroll"]["metrics"]["worker_deaths"] for made in flattened(spread)]
    assert sum(deaths) >= 1 and metrics["toolroll/worker_deaths"] == sum(deaths) / len(deaths)


FILE = """
import os
from toolroll import Environment, Observation, StepResult

class Process(Environment):
    tasks = [{} for _ in range(4)]

    def reset(self, task, seed):
        return Observation([{"role": "user", "content": "Hello."}])

    def step(self, action):
        return StepResult(reward=float(os.getpid()), done=True)
"""


async def test_a_group_is_played_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "process.py").write_text(FILE)
    groups, _ = await rollout(
        lambda request: "Hello.", 2, toolroll_env=f"{tmp_path / 'process.py'}:Process"
    )
    processes = [{made.reward for made in group} for group in groups]
    assert [len(one) for one in processes] == [1] * 4
    assert processes[0] == processes[2] != processes[1] == processes[3]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_parked_episode_is_continued_in_its_process(killed: bool) -> None:
    """If that process has died, the episode starts again."""
    gate, held = asyncio.Event(), {"2/0": 0, "2/2": 2}

    def policy(request: PolicyRequest) -> Reply:
        hold = gate if held.get(request.routing_key) == turn_of(request) else None
        return Reply(says(request), hold=hold, hold_after=2)

    async with serving(policy, weight_version="3") as (engine, args):
        vars(args).update(partial_rollout=True, toolroll_workers=2, over_sampling_batch_size=3)
        source = DataSource(Sample, PROMPTS, n=4)
        first = await asyncio.to_thread(generate_rollout, args, 0, source)
        [back] = source.buffer
        parked = {made.session_id for made in back if made.status.name == "ABORTED"}
        assert parked >= held.keys() and first.metrics["toolroll/parked"] == len(parked)
        for pid in workers() if killed else ():
            os.kill(pid, signal.SIGKILL)
        held.clear()
        args.over_sampling_batch_size = 2
        second = await asyncio.to_thread(generate_rollout, args, 1, source)
        assert second.metrics["toolroll/parked"] == 0
        close_rollout()
    made = flattened(first.samples + second.samples)
    if not killed:
        every_sampled_token_is_as_served([first, second], engine)
    assert told(made) == (await alone())[0]
    counts = [sample.metadata["toolroll"]["metrics"] for sample in made[8:12:2]]
    assert [(one["resumes"], one["restarts"]) for one in counts] == [(not killed, killed)] * 2


async def test_a_death_of_parked_episodes_ends_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody continues them, and their group is dropped."""
    killed: list[int] = []

    async def hook(args: Any, value: Any, *, evaluation: bool) -> Any:
        if value.status.name == "ABORTED":
            killed.extend(workers())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return value

    slime_mirror.install_hooks(monkeypatch, hook)

    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(abort_after=3) if request.routing_key == "0/0" else None

    async with serving(says, faults=faults) as (_, args):
        vars(args).update(toolroll_workers=2, toolroll_partial="park")
        args.rollout_sample_hook_path, args.rollout_batch_size = "a.hook", 1
        args.over_sampling_batch_size = 1
        source = DataSource(Sample, PROMPTS, n=1)
        output = await asyncio.to_thread(generate_rollout, args, 0, source)
        close_rollout()
    assert killed and [group[0].group_index for group in output.samples] == [1]
    assert output.metrics["rollout/dynamic_filter/drop_aborted"] == 1


async def test_slime_stops_the_episodes_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running turn goes on to its end, and the next one does not start."""
    state, sent, reached = slime_mirror.install_loop(monkeypatch), asyncio.Event(), set[str]()
    send = RayPlayer._send_stops

    async def noted(self: RayPlayer) -> None:
        aborted = state.aborted
        await send(self)
        if aborted:
            sent.set()

    monkeypatch.setattr(RayPlayer, "_send_stops", noted)

    def policy(request: PolicyRequest) -> Reply:
        if turn_of(request) == 1:
            reached.add(request.routing_key)
            state.aborted = state.aborted or len(reached) == 2
        return Reply(says(request), hold=sent if turn_of(request) else None)

    async def plays(args: Any, sample: Any) -> Any:
        return await generate(args, sample, dict(SAMPLING))

    async with serving(policy) as (engine, args):
        vars(args).update(partial_rollout=True, toolroll_workers=2)
        groups = DataSource(Sample, PROMPTS, n=1).get_samples(2)
        cut = await asyncio.gather(*(play_group(args, group, plays) for group in groups))
        assert len(engine.log) == 4
        assert {made.status.name for made in flattened(cut)} == {"ABORTED"}
        state.aborted = False
        made = [await play_group(args, group, plays) for group in cut]
    assert [one.metadata["toolroll"]["metrics"]["resumes"] for one in flattened(made)] == [1, 1]
    assert {one.reward for one in flattened(made)} == {1.0}


# --- a program as the agent -----------------------------------------------------------------------

MARKER = "98765432"


@pytest.fixture
def trials(tmp_path: Path) -> dict[str, Any]:
    """slime's arguments for trials of a task."""
    if reason := refusal():
        pytest.skip(f"needs user namespaces: {reason}")
    write_task(tmp_path)
    where = {"toolroll_env": "harbor", "toolroll_env_args": {"path": str(tmp_path)}}
    return {**where, "toolroll_agent": "program", "toolroll_command": command_of()}


async def test_a_failed_group_of_trials_is_replaced(trials: dict[str, Any]) -> None:
    def policy(request: PolicyRequest) -> str:
        number = request.routing_key.split("-")[1]
        # in each group, the second sample does nothing
        return "I cannot." if number == "1" else replies()[turn_of(request)]

    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(status=500) if request.routing_key.startswith("1-0-") else None

    async with serving(policy, faults=faults) as (engine, args):
        vars(args).update(trials, toolroll_reruns=0, over_sampling_batch_size=1)
        args.toolroll_command = f"setsid sleep {MARKER} & {command_of()}"
        source = DataSource(Sample, [{"prompt": 0}], n=2)
        output = await asyncio.to_thread(generate_rollout, args, 0, source)
    groups = [[sample.group_index for sample in group] for group in output.samples]
    assert groups == [[0, 0], [2, 2]], "the group with an aborted trial is replaced"
    assert [[sample.reward for sample in group] for group in output.samples] == [[1.0, 0.0]] * 2
    samples = flattened(output.samples)
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
        turns.append(turn_of(request))
        return replies()[turns[-1]]

    async with serving(policy) as (_, args):
        vars(args).update(trials)

        async def trial(*, stops: bool) -> tuple[str, float | None]:
            """The status and the reward. The rollout stops after the first turn if it `stops`."""
            turns.clear()
            sample = Sample(prompt=0, group_index=0, index=0)
            [played] = await play_sample(
                args, sample, SAMPLING, evaluation=False, stopped=lambda: stops and bool(turns)
            )
            return played.status.name, played.reward

        assert (await trial(stops=True), turns) == (("ABORTED", None), [0])
        assert (await trial(stops=False), turns) == (("COMPLETED", 1.0), [0, 1])
        assert (await trial(stops=True), turns) == (("ABORTED", None), [0])
