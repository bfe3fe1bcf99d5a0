"""Parked episodes: after an abort by slime, an episode waits and is continued."""

from __future__ import annotations

import asyncio
import importlib
import random
from argparse import Namespace
from collections.abc import Iterable
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import miles_mirror
from support.slime_mirror import DataSource, flattened, install_hooks, install_loop, train_data
from support.slime_trainer import (
    SAMPLING,
    every_sampled_token_is_as_served,
    forking,
    real_slime,
    reference_lines,
    says,
    serving,
)
from support.tiers import costly
from support.wire import until

from toolroll.environments.desk.environment import Desk
from toolroll.evaluation import worker_pool
from toolroll.evaluation.worker_pool import WorkerDiedError
from toolroll.rollout.engine import admission
from toolroll.rollout.errors import RolloutError
from toolroll.rollout.types import Trajectory, Turn
from toolroll.testing import (
    EmbeddedEngine,
    Fault,
    PolicyRequest,
    Reply,
    embedded_tokenizer_path,
    fault_at,
)
from toolroll.testing.policy import LoggedRequest
from toolroll.trainers import miles
from toolroll.trainers.parking import masked
from toolroll.trainers.slime import (
    aclose,
    generate,
    generate_rollout,
    ray_player,
    training,
)
from toolroll.trainers.slime.generation import _players, play_sample, player
from toolroll.trainers.slime.samples import leaves


class Environments:
    """The environments that were reset, those that were closed, and the state of each then."""

    def __init__(self) -> None:
        self.opened: list[Desk] = []
        self.closed: list[Desk] = []
        self.states: list[str] = []


def state_of(desk: Desk) -> str:
    assert desk._task is not None and desk._db is not None and desk._user is not None
    rows, user = list(desk._db.iterdump()), desk._user.metrics()
    return repr((desk._task.id, rows, user, desk._replies, desk._tool_errors, desk._done))


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> Environments:
    counted, reset, close = Environments(), Desk.reset, Desk.close

    async def counted_reset(self: Desk, *args: Any) -> Any:
        observation = await reset(self, *args)
        counted.opened.append(self)
        return observation

    async def counted_close(self: Desk) -> None:
        if self in counted.opened and self not in counted.closed:
            counted.states.append(state_of(self))
        await close(self)
        if self in counted.opened:  # `reset` closes what it finds
            counted.closed.append(self)

    monkeypatch.setattr(Desk, "reset", counted_reset)
    monkeypatch.setattr(Desk, "close", counted_close)
    return counted


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The state of slime's own loop, which says whether it stops."""
    return install_loop(monkeypatch)


def is_aborted(sample: Any) -> bool:
    return bool(sample.status.name == "ABORTED")


def served_versions(entries: Iterable[LoggedRequest]) -> dict[int, str]:
    """The weight version of each token that one session sampled, by its position."""
    return {
        len(entry.input_ids) + at: span["version"]
        for entry in entries
        for span in entry.weight_versions
        for at in range(span["start"], span["end"])
    }


def spans(mask: list[int], cut: int, versions: dict[int, str]) -> list[str]:
    """The version of each run of sampled tokens with one version, in the order of the turns."""
    return [
        version
        for sampled, run in groupby(enumerate(mask), key=lambda pair: pair[1])
        if sampled
        for version, _ in groupby(versions[cut + at] for at, _ in run)
    ]


def check_parked(parked: Any, plain: Any) -> None:
    """A parked sample has the tokens so far, and none of them is trained."""
    length = len(parked.tokens)
    assert parked.tokens == plain.tokens[:length] and parked.reward is None
    assert len(parked.loss_mask) == len(parked.rollout_log_probs) == parked.response_length
    assert 1 <= parked.response_length < length and not any(parked.loss_mask)
    assert parked.remove_sample
    cut = len(plain.tokens) - plain.response_length
    if length > cut:
        assert parked.rollout_log_probs == plain.rollout_log_probs[: length - cut]
        assert parked.response


@costly(2)
@given(
    cuts=st.dictionaries(st.integers(0, 9), st.integers(0, 12), max_size=5),
    stops=st.sets(st.integers(0, 6), max_size=3),
    mask=st.booleans(),
)
async def test_an_episode_is_what_it_would_have_been_without_the_aborts(
    sample_type: Any,
    state: Namespace,
    environments: Environments,
    cuts: dict[int, int],
    stops: set[int],
    mask: bool,
) -> None:
    """Request n is aborted after `cuts[n]` tokens. During the calls `stops`, slime stops: the turn
    goes on to its end, the environment makes its step, and the next turn does not start. The
    weights change with each abort.
    """
    state.aborted = False  # the fixtures are those of the example before
    async with serving() as (_, args):
        [plain] = await generate(args, sample_type(prompt=0, index=3), dict(SAMPLING))
    left = set(stops)

    def policy(request: PolicyRequest) -> Any:
        if request.call in left:
            left.remove(request.call)
            state.aborted = True
        return says()(request)

    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(abort_after=cuts[request.index]) if request.index in cuts else None

    for seen in (environments.opened, environments.closed):
        seen.clear()
    async with serving(policy, faults=faults, weight_version="0") as (engine, args):
        args.partial_rollout, args.mask_offpolicy_in_partial_rollout = True, mask
        sample, aborts, cut = sample_type(prompt=0, index=3, session_id="s"), 0, 0
        while aborts == 0 or is_aborted(sample):
            if aborts:
                check_parked(sample[0], plain)
                cut = len(sample.tokens)
                engine.set_weight_version(str(aborts))
            state.aborted = False
            sample = await generate(args, sample, dict(SAMPLING))
            aborts += 1
        [made] = sample
        assert await player(args).parked_metrics() == {"toolroll/parked": 0.0}
    prompt = len(plain.tokens) - plain.response_length
    assert (made.tokens, made.reward) == (plain.tokens, plain.reward)
    assert made.rollout_log_probs == plain.rollout_log_probs
    trained = [kept * (not mask or prompt + at >= cut) for at, kept in enumerate(plain.loss_mask)]
    assert made.loss_mask == trained
    assert made.weight_versions == spans(plain.loss_mask, prompt, served_versions(engine.log))
    assert len(environments.opened) == 1 and environments.opened == environments.closed
    metrics = made.metadata["toolroll"]["metrics"]
    assert (metrics["resumes"], metrics["restarts"]) == (aborts - 1, 0)
    train_data([made])


def cut_once(call: int = 1) -> Any:
    """Faults that abort each session once, in its turn `call`."""
    seen = set[str]()

    def faults(request: PolicyRequest) -> Fault | None:
        if request.call != call or request.routing_key in seen:
            return None
        seen.add(request.routing_key)
        return Fault(abort_after=3)

    return faults


@pytest.mark.parametrize(
    "setting", [{"max_parked": 1}, {"parked_timeout": 1e-9}, {"max_weight_versions": 1}, {}]
)
async def test_a_limit_starts_an_episode_again(
    sample_type: Any, environments: Environments, setting: dict[str, Any]
) -> None:
    async with serving(faults=cut_once()) as (engine, args):
        args.partial_rollout = True
        vars(args).update({f"toolroll_{name}": value for name, value in setting.items()})
        parked = [
            await generate(args, sample_type(prompt=0, index=at, session_id=f"s{at}"), SAMPLING)
            for at in range(2)
        ]
        while "parked_timeout" in setting and len(environments.closed) < 2:
            await asyncio.sleep(0)
        turns = len(engine.log)
        again = [await generate(args, sample, dict(SAMPLING)) for sample in reversed(parked)]
        metrics = await player(args).parked_metrics()
    dropped = {"max_parked": 1, "parked_timeout": 2, "max_weight_versions": 2}
    lost = sum(dropped[name] for name in setting)
    assert metrics == {"toolroll/parked": 0.0} | {
        f"toolroll/parked_dropped/{name}": dropped[name] for name in setting
    }
    episodes = [made.metadata["toolroll"]["metrics"] for [made] in again]
    assert [(one["resumes"], one["restarts"]) for one in episodes] == [
        (at < 2 - lost, at >= 2 - lost) for at in range(2)
    ]
    assert len(engine.log) > turns and len(environments.opened) == 2 + lost
    assert sorted(map(id, environments.closed)) == sorted(map(id, environments.opened))


@pytest.mark.parametrize(("can_wait", "stop"), [(False, None), (True, ["never sampled"])])
async def test_what_cannot_be_resumed_starts_again(
    sample_type: Any,
    environments: Environments,
    monkeypatch: pytest.MonkeyPatch,
    can_wait: bool,
    stop: list[str] | None,
) -> None:
    monkeypatch.setattr(Desk, "can_wait", can_wait)
    sampling = {**SAMPLING, "stop": stop}
    async with serving(faults=fault_at({1: Fault(abort_after=3)})) as (_, args):
        args.partial_rollout = True
        cut = await generate(args, sample_type(prompt=0, index=0), dict(sampling))
        assert is_aborted(cut) and len(environments.closed) == 1
        cut.session_id = "other"  # the policy counts the turns of a session
        [made] = await generate(args, cut, dict(sampling))
    assert made.reward == 1.0 and made.metadata["toolroll"]["metrics"]["restarts"] == 1
    assert len(environments.opened) == len(environments.closed) == 2


@pytest.mark.parametrize("end", ["aclose", "loop"])
def test_the_end_of_the_adapter_or_of_its_loop_closes_parked_episodes(
    sample_type: Any, environments: Environments, end: str
) -> None:
    """Another loop, as another process would, plays the sample from the beginning."""
    left: list[Any] = []

    async def first() -> Any:
        async with serving(faults=cut_once()) as (_, args):
            args.partial_rollout = True
            cut = await generate(args, sample_type(prompt=0, index=0), dict(SAMPLING))
            assert is_aborted(cut) and environments.closed == []
            if end == "aclose":
                await aclose()
                assert len(environments.closed) == 1
            left.extend(_players.pop())
        return cut

    async def second(cut: Any) -> Any:
        async with serving() as (_, args):
            args.partial_rollout = True
            return await generate(args, cut, dict(SAMPLING))

    cut = asyncio.run(first())
    assert environments.closed == environments.opened and len(environments.closed) == 1
    [made] = asyncio.run(second(cut))
    for player_left in left:
        player_left.model.release()
    assert made.reward == 1.0
    metrics = made.metadata["toolroll"]["metrics"]
    assert (metrics["resumes"], metrics["restarts"]) == (0, 1)


async def test_a_cancelled_call_closes_its_episode(
    sample_type: Any, environments: Environments
) -> None:
    """Also if the episode was parked before."""
    gate = asyncio.Event()

    def policy(request: PolicyRequest) -> Reply:
        held = request.call == 2
        return Reply(reference_lines(0)[request.call], hold=gate if held else None)

    async with serving(policy, faults=cut_once()) as (engine, args):
        args.partial_rollout = True
        cut = await generate(args, sample_type(prompt=0, index=0), dict(SAMPLING))
        again = asyncio.create_task(generate(args, cut, dict(SAMPLING)))
        await engine.until(lambda core: core.held > 0)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
        assert environments.closed == environments.opened and len(environments.closed) == 1


async def test_a_stop_and_parked_episodes_leave_the_cache_to_others(
    sample_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds one episode. A second one waits when the rollout stops, and while the first
    is parked, an evaluation has the cache.
    """
    monkeypatch.setattr(admission, "_LOOK_AGAIN", 0.01)
    stopped, gate = False, asyncio.Event()

    def policy(request: PolicyRequest) -> Reply:
        hold = None if stopped else gate
        return Reply(reference_lines(0)[request.call], hold=hold, hold_after=1)

    def play(sample: Any, *, evaluation: bool = False) -> asyncio.Task[Any]:
        return asyncio.create_task(
            play_sample(
                args, sample, SAMPLING, evaluation=evaluation,
                stopped=lambda: stopped and not evaluation,
            )
        )  # fmt: skip

    async with serving(policy, pool=200) as (engine, args):
        args.partial_rollout = True
        playing: Any = player(args)
        waiting = playing.model.admission
        plays = [
            play(sample_type(prompt=0, index=index, session_id=str(index))) for index in (0, 1)
        ]

        async def one_waits() -> bool:
            return engine.held == waiting.held == 1

        await until(one_waits, "one episode samples, and the other waits")
        stopped = True
        await playing.abort()
        cut = [(await each)[0] for each in plays]
        assert all(map(is_aborted, cut)) and waiting.held == 0
        tested = await play(sample_type(prompt=0, index=2, session_id="2"), evaluation=True)
        stopped = False
        gate.set()
        made = [(await play(sample))[0] for sample in cut]
    assert [one.reward for one in (tested, *made)] == [1.0] * 3
    assert [one.metadata["toolroll"]["metrics"]["resumes"] for one in made] == [1, 1]


async def test_a_cancelled_call_closes_all_parked_episodes(
    sample_type: Any, environments: Environments
) -> None:
    async with serving(faults=cut_once()) as (_, args):
        args.partial_rollout = True
        parked = [
            await generate(args, sample_type(prompt=0, index=at, session_id=f"s{at}"), SAMPLING)
            for at in range(2)
        ]
        closing = asyncio.create_task(player(args).close_parked(leaves(parked)))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert len(environments.opened) == len(environments.closed) == 2


async def test_an_evaluation_does_not_park(sample_type: Any, environments: Environments) -> None:
    async with serving(faults=cut_once()) as (_, args):
        args.partial_rollout = True
        sample = sample_type(prompt=0, index=0)
        assert is_aborted(await generate(args, sample, dict(SAMPLING), evaluation=True))
        assert len(environments.closed) == 1


@pytest.mark.parametrize(
    ("trainer", "setting", "parks"),
    [
        ({}, None, False),
        ({"partial_rollout": True}, None, True),
        ({"partial_rollout": True}, "restart", False),
        ({"rollout_function_path": "slime.rollout.fully_async_rollout.generate_x"}, None, True),
        ({"rollout_function_path": "mine.fully_async"}, "park", True),
    ],
)
async def test_an_episode_is_parked_if_the_trainer_passes_its_sample_again(
    sample_type: Any,
    environments: Environments,
    trainer: dict[str, Any],
    setting: str | None,
    parks: bool,
) -> None:
    async with serving(faults=cut_once()) as (_, args):
        vars(args).update(trainer, toolroll_partial=setting)
        assert is_aborted(await generate(args, sample_type(prompt=0, index=0), dict(SAMPLING)))
        assert len(environments.closed) == (not parks)


@pytest.mark.parametrize("mask", [False, True])
async def test_the_mask_covers_all_sequences_of_a_forked_episode(
    sample_type: Any, tmp_path: Path, mask: bool
) -> None:
    async with forking(tmp_path, faults=cut_once(2)) as (engine, args):
        args.partial_rollout, args.mask_offpolicy_in_partial_rollout = True, mask
        cut = await generate(args, sample_type(prompt=0, index=0, session_id="s"), dict(SAMPLING))
        assert is_aborted(cut) and len(cut) == 1
        before = len(engine.log)
        made = await generate(args, cut, dict(SAMPLING))
    assert len(made) > 1
    trained = engine.log[before if mask else 0 :]
    assert sum(sum(sample.loss_mask) for sample in made) == sum(
        len(entry.output_ids) for entry in trained
    )
    ids = [
        token
        for sample in made
        for token, kept in zip(
            sample.tokens[-sample.response_length :], sample.loss_mask, strict=True
        )
        if kept
    ]
    assert ids == [token for entry in trained for token in entry.output_ids]


def test_a_turn_that_an_earlier_sequence_has_is_not_masked_again() -> None:
    """The second sequence repeats the first one's first turn as context."""

    def sequence(*turns: Turn) -> Trajectory:
        mask = np.zeros(9, dtype=np.int32)
        for turn in turns:
            mask[turn.start : turn.stop] = turn.excluded is None
        logprobs = np.zeros(9, dtype=np.float32)
        return Trajectory(np.arange(9, dtype=np.int32), mask, logprobs, turns, 1)

    first = sequence(Turn(1, 3, "stop"), Turn(4, 6, "stop"))
    second = sequence(
        Turn(1, 3, "stop", excluded="context"), Turn(4, 7, "stop"), Turn(8, 9, "stop")
    )
    masks = [one.loss_mask.tolist() for one in masked((first, second), 2, 2)]
    assert masks == [[0] * 9, [0, 0, 0, 0, 0, 0, 1, 0, 1]]


async def test_miles_continues_a_parked_episode(
    monkeypatch: pytest.MonkeyPatch, environments: Environments
) -> None:
    miles_mirror.install(monkeypatch)
    async with serving() as (engine, args):
        args.partial_rollout = True
        state = miles_mirror.GenerateState(args)

        def asked(sample: Any) -> Any:
            return miles_mirror.GenerateFnInput(state, sample, dict(SAMPLING), False)

        playing = asyncio.create_task(miles.generate(asked(miles_mirror.Sample(prompt=0, index=1))))
        await engine.until(lambda core: len(core.log) > 1)
        state.aborted = True
        cut = (await playing).samples
        assert is_aborted(cut)
        turns, state.aborted = len(engine.log), False
        [made] = (await miles.generate(asked(cut))).samples
    assert made.reward == 1.0 and len(environments.closed) == len(environments.opened) == 1
    assert len(engine.log) > turns and made.routing_key == cut.routing_key


async def test_generate_rollout_parks_what_is_left_and_continues_it(
    sample_type: Any, closing: None, environments: Environments
) -> None:
    """The samples of group 2 are held in different turns, and one is over before the rollout."""
    gate = asyncio.Event()

    def policy(request: PolicyRequest) -> Reply:
        group, at = map(int, request.routing_key.split("/"))
        held = group == 2 and request.call == at
        return Reply(reference_lines(0)[request.call], hold=gate if held else None, hold_after=2)

    async with serving(policy, weight_version="0") as (engine, args):
        vars(args).update(over_sampling_batch_size=3, partial_rollout=True)
        source = DataSource(sample_type, [{"prompt": 0}], n=7)
        first = await asyncio.to_thread(generate_rollout, args, 0, source)
        [back] = source.buffer
        assert [sample.status.name for sample in back] == ["ABORTED"] * 5 + ["COMPLETED"] * 2
        assert all(sample.metadata["start_rollout_id"] == 0 for sample in back)
        assert first.metrics["toolroll/parked"] == 5
        engine.set_weight_version("1")
        args.over_sampling_batch_size = 2
        second = await asyncio.to_thread(generate_rollout, args, 1, source)
    assert [group[0].group_index for group in first.samples] == [0, 1]
    assert [group[0].group_index for group in second.samples] == [2, 3]
    assert second.metrics["toolroll/parked"] == 0
    assert second.metrics["toolroll/resumes"] == 5 / 14
    assert {sample.reward for group in second.samples for sample in group} == {1.0}
    made = second.samples[0]
    assert len({tuple(sample.tokens) for sample in made}) == 1, "one policy, one task"
    assert [len(set(sample.weight_versions)) for sample in made] == [2] * 5 + [1] * 2
    assert len(environments.opened) == 7 * 4 == len(environments.closed)
    every_sampled_token_is_as_served([first, second], engine)
    train_data(flattened(second.samples))


@pytest.mark.parametrize("partial", [None, "restart"])
async def test_groups_that_are_finished_beyond_the_batch_are_put_back(
    sample_type: Any, closing: None, partial: str | None
) -> None:
    """The finished groups of an earlier rollout are all over at once."""
    async with serving() as (_, args):
        vars(args).update(partial_rollout=True, toolroll_partial=partial)
        args.rollout_batch_size = args.over_sampling_batch_size = 3
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        source.add_samples((await asyncio.to_thread(generate_rollout, args, 0, source)).samples)
        args.rollout_batch_size = 1
        [made] = (await asyncio.to_thread(generate_rollout, args, 1, source)).samples
    assert sorted(group[0].group_index for group in [made, *source.buffer]) == [0, 1, 2]
    train_data(flattened([made, *source.buffer]))


class Unreachable:
    """A worker that cannot be reached during its first episode, which its process plays on."""

    plays: list[asyncio.Future[Any]]

    def __init__(self, open_: Any) -> None:
        self._opening = asyncio.ensure_future(open_(AsyncExitStack()))

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        held = await self._opening
        call = asyncio.ensure_future(getattr(held, method)(*args, **options))
        if method == "play":
            self.plays.append(call)
            if len(self.plays) == 1:
                raise WorkerDiedError("ActorUnavailableError")
        return await call

    async def close(self) -> None:
        await (await self._opening)._player.aclose()


@pytest.mark.parametrize("parked", [False, True])
async def test_an_episode_may_be_played_twice_by_a_process_that_was_only_unreachable(
    sample_type: Any,
    environments: Environments,
    monkeypatch: pytest.MonkeyPatch,
    parked: bool,
) -> None:
    monkeypatch.setattr(ray_player, "RayWorker", Unreachable)
    monkeypatch.setattr(Unreachable, "plays", [], raising=False)
    monkeypatch.setattr(worker_pool, "_PAUSE", 0.0)

    def policy(request: PolicyRequest) -> str:
        lines, turn = reference_lines(0), request.text.count("<|turn|>assistant") - 1
        return lines[turn] if turn < len(lines) else "Goodbye."

    async with serving(policy, faults=lambda _: Fault(abort_after=3) if parked else None) as (
        _,
        args,
    ):
        vars(args).update(partial_rollout=True, toolroll_workers=2)
        [made] = await generate(args, sample_type(prompt=0, index=0, session_id="s"), SAMPLING)
        await asyncio.wait(Unreachable.plays)
        assert [call.exception() for call in Unreachable.plays] == [None, None]
        metrics = await player(args).parked_metrics()
        [again] = await generate(args, made, SAMPLING) if parked else [made]
    assert metrics == {"toolroll/parked": float(parked)}
    assert is_aborted(made) if parked else made.reward == 1.0
    assert again.metadata["toolroll"]["metrics"]["worker_deaths"] == 1
    assert len(environments.opened) == 2
    assert sorted(map(id, environments.closed)) == sorted(map(id, environments.opened))


async def test_generate_rollout_continues_what_the_engine_aborts(
    sample_type: Any, closing: None, environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted group is played on in the same rollout, and is no failure."""
    monkeypatch.setattr(training, "_MOST_ABORTED", 1)
    async with serving(faults=cut_once()) as (_, args):
        vars(args).update(over_sampling_batch_size=1, partial_rollout=True)
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        output = await asyncio.to_thread(generate_rollout, args, 5, source)
    assert [group[0].group_index for group in output.samples] == [0, 1]
    made = flattened(output.samples)
    assert [sample.metadata["toolroll"]["metrics"]["resumes"] for sample in made] == [1] * 4
    assert not any("drop" in name for name in output.metrics)
    assert output.metrics["toolroll/parked"] == 0 and source.buffer == []
    assert len(environments.opened) == len(environments.closed) == 4
    train_data(made)


async def test_an_engine_that_aborts_every_request_ends_the_rollout(
    sample_type: Any, closing: None, environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_MOST_CONTINUED", 3)
    monkeypatch.setattr(training, "_MOST_ABORTED", 1)
    async with serving(faults=lambda request: Fault(abort_after=1)) as (_, args):
        vars(args).update(over_sampling_batch_size=1, partial_rollout=True)
        source = DataSource(sample_type, [{"prompt": 0}], n=1)
        with pytest.raises(RolloutError, match="could not be graded"):
            await asyncio.to_thread(generate_rollout, args, 5, source)
        # Another group may be parked, and a later rollout gets it.
        assert len(environments.opened) - len(environments.closed) <= len(source.buffer)


async def test_an_error_in_a_group_closes_its_parked_episodes(
    sample_type: Any, closing: None, environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data source gets the group without the sessions of these episodes."""

    async def failing(args: Any, value: Any, *, evaluation: bool) -> Any:
        assert is_aborted(value)
        raise ValueError("the hook failed")

    install_hooks(monkeypatch, failing)
    async with serving(faults=cut_once()) as (_, args):
        vars(args).update(over_sampling_batch_size=2, partial_rollout=True)
        args.rollout_sample_hook_path = "a.hook"
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        with pytest.raises(ValueError, match="the hook failed"):
            await asyncio.to_thread(generate_rollout, args, 0, source)
    assert environments.opened
    assert sorted(map(id, environments.closed)) == sorted(map(id, environments.opened))


# --- slime's own loops ----------------------------------------------------------------------------


def plays_tasks(request: PolicyRequest) -> list[str]:
    """The reference of the task that the session names: g<group>/<position>."""
    return reference_lines(int(request.routing_key[1:].split("/")[0]) % 3)


class Groups(DataSource):
    """Groups of the tasks 0 to 2 in turn. Each sample has a session of its own."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for group in groups:
            for at, sample in enumerate(group):
                sample.session_id = f"g{group[0].group_index}/{at}"
        return groups


def slime_arguments(args: Namespace, **others: Any) -> None:
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


async def uninterrupted(samples: list[Any], sample_type: Any) -> list[Any]:
    """The samples as they are if nothing is aborted, on an engine of their own."""
    async with serving(lambda seen: plays_tasks(seen)[seen.call]) as (_, args):
        slime_arguments(args)
        made = [
            await generate(
                args,
                sample_type(prompt=one.prompt, index=one.index, session_id=one.session_id),
                dict(SAMPLING),
            )
            for one in samples
        ]
    return flattened(made)


async def check_the_ends(samples: list[Any], environments: Environments, sample_type: Any) -> None:
    """Compare the rewards and the environments' last states with those without aborts."""
    ended = sorted(environments.states)
    environments.states.clear()
    plain = await uninterrupted(samples, sample_type)
    assert [made.reward for made in samples] == [other.reward for other in plain]
    assert sorted(environments.states) == ended


async def check_that_nothing_was_lost(
    samples: list[Any], engine: EmbeddedEngine, sample_type: Any, *, mask: bool = False
) -> None:
    """Compare `samples` with the same episodes without aborts."""
    train_data(samples)
    if not mask:
        every_sampled_token_is_as_served([Namespace(samples=[samples])], engine)
    plain = await uninterrupted(samples, sample_type)
    for made, other in zip(samples, plain, strict=True):
        cut = len(made.tokens) - made.response_length
        versions = served_versions(
            entry for entry in engine.log if entry.routing_key == made.session_id
        )
        assert made.weight_versions == spans(other.loss_mask, cut, versions)
        assert (made.tokens, made.reward) == (other.tokens, other.reward)
        assert made.rollout_log_probs == other.rollout_log_probs
        if mask:
            newest = made.weight_versions[-1]
            assert made.loss_mask == [
                int(versions.get(cut + at) == newest) for at in range(made.response_length)
            ]
        else:
            assert made.loss_mask == other.loss_mask


@pytest.mark.peers
@pytest.mark.parametrize("mask", [False, True])
async def test_slime_s_partial_rollout_loses_nothing(
    slime_loop: Any, monkeypatch: pytest.MonkeyPatch, environments: Environments, mask: bool
) -> None:
    """Four rollouts of two groups in slime's own loop. In each, one group more has begun, and its
    samples are cut at random: those of group 2 twice.
    """
    sample_type = real_slime("slime.utils.types").Sample
    http = importlib.import_module("slime.utils.http_utils")
    monkeypatch.setattr(http, "_http_client", None)
    chance, never, rollout = random.Random(7), asyncio.Event(), 0
    held = {
        (number, f"g{group}/{at}"): (chance.choice(calls), chance.randrange(9))
        for number, group, calls in ((0, 2, (0, 1)), (1, 2, (2, 3)), (2, 6, (0, 1, 2)))
        for at in (0, 1, 3)
    }

    def policy(request: PolicyRequest) -> Reply:
        call, tokens = held.get((rollout, request.routing_key), (None, 0))
        hold = None if call != request.call else never
        return Reply(plays_tasks(request)[request.call], hold=hold, hold_after=tokens)

    groups: list[Any] = []
    async with serving(policy, weight_version="0") as (engine, args):
        slime_arguments(
            args,
            partial_rollout=True,
            mask_offpolicy_in_partial_rollout=mask,
            over_sampling_batch_size=3,
        )
        http.init_http_client(args)
        source = Groups(sample_type, [{"prompt": at} for at in range(3)], n=4)
        while rollout < 4:
            engine.set_weight_version(str(rollout))
            output, aborted = await slime_loop.generate_rollout_async(
                args, rollout, source.get_samples
            )
            source.add_samples(aborted)
            groups += output.samples
            rollout += 1
            args.over_sampling_batch_size = 2 if rollout == 3 else 3
        assert await player(args).parked_metrics() == {"toolroll/parked": 0.0}
        await http._http_client.aclose()
    samples = flattened(groups)
    assert sum(made.metadata["toolroll"]["metrics"]["resumes"] for made in samples) == len(held)
    assert sum(made.metadata["toolroll"]["metrics"]["restarts"] for made in samples) == 0
    assert len(environments.opened) == len(environments.closed) == len(samples)
    await check_the_ends(samples, environments, sample_type)
    await check_that_nothing_was_lost(
        [made for made in samples if any(made.loss_mask)], engine, sample_type, mask=mask
    )
    assert [made for made in samples if not any(made.loss_mask)] == [] or mask


@pytest.mark.peers
async def test_slime_s_fully_asynchronous_rollout_loses_nothing(
    slime_loop: Any, environments: Environments
) -> None:
    """slime puts an aborted group back at once. Each session is aborted at random."""
    sample_type = real_slime("slime.utils.types").Sample
    worker_module = importlib.import_module("slime.rollout.fully_async_rollout")
    chance = random.Random(11)

    def faults(request: PolicyRequest) -> Fault | None:
        engine.set_weight_version(str(request.index // 8))
        return Fault(abort_after=chance.randrange(9)) if chance.random() < 0.3 else None

    async with serving(
        lambda seen: plays_tasks(seen)[seen.call], faults=faults, weight_version="0"
    ) as (engine, args):
        slime_arguments(
            args,
            rollout_function_path=f"{worker_module.__name__}.generate_rollout_fully_async",
        )
        source = Groups(sample_type, [{"prompt": at} for at in range(3)], n=4)
        worker = worker_module.AsyncRolloutWorker(args, source, concurrency=2)
        worker.poll_interval = 0
        running, groups = asyncio.create_task(worker._loop()), list[Any]()
        while len(groups) < 6:
            groups += [group for _, group in worker.get_completed_groups()]
            await asyncio.sleep(0)
        worker.running = False
        await running
        groups += [group for _, group in worker.get_completed_groups()]
    samples = flattened(groups)
    assert sum(made.metadata["toolroll"]["metrics"]["resumes"] for made in samples) > len(samples)
    assert sum(made.metadata["toolroll"]["metrics"]["restarts"] for made in samples) == 0
    await check_that_nothing_was_lost(samples, engine, sample_type)
