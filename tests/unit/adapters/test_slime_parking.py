"""Parked episodes: after an abort by slime, an episode waits and is continued."""

import asyncio
from argparse import Namespace
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forked_episodes import sequence
from support.slime_mirror import flattened, install_hooks, train_data
from support.slime_trainer import (
    SAMPLING,
    Environments,
    every_sampled_token_is_as_served,
    fields_of,
    forking,
    play,
    plays_the_reference,
    says,
    served_versions,
    serving,
    version_spans,
)
from support.tiers import costly
from support.wire import until

from toolroll.environments.desk.environment import Desk
from toolroll.evaluation import worker_pool
from toolroll.evaluation.worker_pool import WorkerDiedError
from toolroll.rollout.engine import admission
from toolroll.rollout.errors import RolloutError
from toolroll.testing import Fault, PolicyRequest, Reply
from toolroll.trainers.parking import masked
from toolroll.trainers.slime import aclose, ray_player, training
from toolroll.trainers.slime.generation import _players, play_sample, player
from toolroll.trainers.slime.samples import leaves


def is_aborted(sample: Any) -> bool:
    return bool(sample.status.name == "ABORTED")


def metrics_of(sample: Any, names: str = "resumes restarts") -> list[float]:
    metrics = sample.metadata["toolroll"]["metrics"]
    return [metrics.get(name, 0) for name in names.split()]


def cut_once(call: int = 1) -> Any:
    """Faults that abort each session once, in its turn `call`."""
    cut_sessions = set[str]()

    def faults(request: PolicyRequest) -> Fault | None:
        if request.call != call or request.routing_key in cut_sessions:
            return None
        cut_sessions.add(request.routing_key)
        return Fault(abort_after=3)

    return faults


def check_parked(parked: Any, plain: Any) -> None:
    """A parked sample has the tokens so far, and none of them is trained."""
    length = len(parked.tokens)
    assert parked.tokens == plain.tokens[:length] and parked.reward is None
    assert len(parked.loss_mask) == len(parked.rollout_log_probs) == parked.response_length
    assert 1 <= parked.response_length < length and not any(parked.loss_mask)
    assert parked.remove_sample
    prompt = len(plain.tokens) - plain.response_length
    if length > prompt:
        assert parked.rollout_log_probs == plain.rollout_log_probs[: length - prompt]
        assert parked.response


@costly(2)
@given(
    cuts=st.dictionaries(st.integers(0, 9), st.integers(0, 12), max_size=5),
    stops=st.sets(st.integers(0, 6), max_size=3),
    mask=st.booleans(),
)
async def test_an_episode_is_what_it_would_have_been(
    sample_type: Any,
    slime_state: Namespace,
    environments: Environments,
    cuts: dict[int, int],
    stops: set[int],
    mask: bool,
) -> None:
    """Request n is aborted after `cuts[n]` tokens. During the calls `stops`, slime stops: the turn
    goes on to its end, the environment makes its step, and the next turn does not start. The
    weights change with each abort.
    """
    slime_state.aborted = False  # the fixtures are those of the example before
    async with serving() as (_, args):
        [plain] = await play(args, sample_type(prompt=0, index=3))
    stops_left = set(stops)

    def policy(request: PolicyRequest) -> Any:
        if request.call in stops_left:
            stops_left.remove(request.call)
            slime_state.aborted = True
        return says()(request)

    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(abort_after=cuts[request.index]) if request.index in cuts else None

    environments.clear()
    async with serving(policy, faults=faults, weight_version="0") as (engine, args):
        args.partial_rollout, args.mask_offpolicy_in_partial_rollout = True, mask
        sample, aborts, off_policy = sample_type(prompt=0, index=3, session_id="s"), 0, 0
        while aborts == 0 or is_aborted(sample):
            if aborts:
                check_parked(sample[0], plain)
                off_policy = len(sample.tokens)
                engine.set_weight_version(str(aborts))
            slime_state.aborted = False
            sample = await play(args, sample)
            aborts += 1
        [sample] = sample
        assert await player(args).parked_metrics() == {"toolroll/parked": 0.0}
    prompt = len(plain.tokens) - plain.response_length
    on_policy = range(off_policy - prompt if mask else 0, plain.response_length)
    expected = fields_of(plain, "tokens reward rollout_log_probs") | {
        "loss_mask": [kept * (i in on_policy) for i, kept in enumerate(plain.loss_mask)],
        "weight_versions": version_spans(plain.loss_mask, prompt, served_versions(engine.log)),
    }
    assert fields_of(sample, expected) == expected
    assert len(environments.opened) == 1 and environments.opened == environments.closed
    assert metrics_of(sample) == [aborts - 1, 0]
    train_data([sample])


PARTIAL: dict[str, Any] = {"partial_rollout": True}
ASYNC = {"rollout_function_path": "slime.rollout.fully_async_rollout.generate_x"}
MINE = {"rollout_function_path": "mine.fully_async", "toolroll_partial": "park"}
OLD = PARTIAL | {"toolroll_parked_timeout": 1e-9}
STALE = PARTIAL | {"toolroll_max_weight_versions": 1}
ABORTED: dict[str, tuple[dict[str, Any], int, dict[str, int]]] = {
    "partial rollout": (PARTIAL, 0, {}),
    "asynchronous rollout": (ASYNC, 0, {}),
    "partial: park": (MINE, 0, {}),
    "no partial rollout": ({}, 2, {}),
    "partial: restart": (PARTIAL | {"toolroll_partial": "restart"}, 2, {}),
    "evaluation": (PARTIAL | {"evaluation": True}, 2, {}),
    "an environment that cannot wait": (PARTIAL | {"can_wait": False}, 2, {}),
    "text that stops": (PARTIAL | {"stop": ["never sampled"]}, 2, {}),
    "max_parked": (PARTIAL | {"toolroll_max_parked": 1}, 1, {"max_parked": 1}),
    "parked_timeout": (OLD, 2, {"parked_timeout": 2}),
    "max_weight_versions": (STALE, 0, {"max_weight_versions": 2}),
}
"""Of two aborted episodes with these settings, how many are over before their samples are passed
again, and how many were parked and given up, by the setting.
"""


@pytest.mark.parametrize("name", ABORTED)
async def test_an_episode_is_parked_or_starts_again(
    sample_type: Any, environments: Environments, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given, closed, dropped = ABORTED[name]
    monkeypatch.setattr(Desk, "can_wait", given.get("can_wait", True))
    sampling, evaluation = SAMPLING | {"stop": given.get("stop")}, given.get("evaluation", False)
    async with serving(plays_the_reference, faults=cut_once()) as (_, args):
        vars(args).update(given)
        own = [{"index": i, "session_id": f"s{i}", "metadata": {"a": i}} for i in (0, 1)]
        samples = [sample_type(prompt=0, **fields) for fields in own]
        aborted = [await play(args, sample, sampling, evaluation=evaluation) for sample in samples]
        assert all(map(is_aborted, aborted))
        while len(environments.closed) < closed:
            await asyncio.sleep(0)
        assert len(environments.closed) == closed
        again = flattened([await play(args, each, sampling) for each in reversed(aborted)])
        metrics = await player(args).parked_metrics()
    restarted = max(closed, sum(dropped.values()))
    assert [metrics_of(sample) for sample in again] == [
        [int(n > restarted), int(n <= restarted)] for n in (2, 1)
    ]
    ends = [(each.reward, each.remove_sample, each.index, each.metadata["a"]) for each in again]
    assert ends == [(1.0, False, 1, 1), (1.0, False, 0, 0)]
    assert metrics == {"toolroll/parked": 0.0} | {
        f"toolroll/parked_dropped/{name}": count for name, count in dropped.items()
    }
    assert len(environments.opened) == 2 + restarted
    environments.check_all_closed()


@pytest.mark.parametrize("end", ["aclose", "loop"])
def test_the_end_closes_the_parked(sample_type: Any, environments: Environments, end: str) -> None:
    """The end of the adapter, or of its loop. Another loop, as another process would, plays the
    sample from the beginning.
    """
    left: list[Any] = []

    async def first() -> Any:
        async with serving(faults=cut_once()) as (_, args):
            args.partial_rollout = True
            aborted = await play(args, sample_type(prompt=0, index=0))
            assert is_aborted(aborted) and environments.closed == []
            if end == "aclose":
                await aclose()
                assert len(environments.closed) == 1
            left.extend(_players.pop())
        return aborted

    async def second(aborted: Any) -> Any:
        async with serving() as (_, args):
            args.partial_rollout = True
            return await play(args, aborted)

    aborted = asyncio.run(first())
    assert environments.closed == environments.opened and len(environments.closed) == 1
    [sample] = asyncio.run(second(aborted))
    for player_left in left:
        player_left.model.release()
    assert sample.reward == 1.0 and metrics_of(sample) == [0, 1]


async def test_a_cancel_closes_the_parked(sample_type: Any, environments: Environments) -> None:
    """Also a second one, which is parked while the call that closes it is cancelled."""
    gate = asyncio.Event()

    def policy(request: PolicyRequest) -> Reply:
        return Reply(says()(request), hold=gate if request.call == 2 else None)

    async with serving(policy, faults=cut_once()) as (engine, args):
        args.partial_rollout = True
        parked = [
            await play(args, sample_type(prompt=0, index=i, session_id=f"s{i}")) for i in (0, 1)
        ]
        again = asyncio.create_task(play(args, parked[0]))
        await engine.until(lambda core: core.held > 0)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
        assert environments.closed == environments.opened[:1]
        closing = asyncio.create_task(player(args).close_parked(leaves(parked)))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        environments.check_all_closed()


async def test_the_parked_free_the_cache(sample_type: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds one episode. A second one waits when the rollout stops, and while the first
    is parked, an evaluation has the cache.
    """
    monkeypatch.setattr(admission, "_LOOK_AGAIN", 0.01)
    stopped, gate = False, asyncio.Event()

    def policy(request: PolicyRequest) -> Reply:
        return Reply(says()(request), hold=None if stopped else gate, hold_after=1)

    def start(sample: Any, *, evaluation: bool = False) -> asyncio.Task[Any]:
        stops = lambda: stopped and not evaluation
        return asyncio.create_task(
            play_sample(args, sample, SAMPLING, evaluation=evaluation, stopped=stops)
        )

    async with serving(policy, pool=200) as (engine, args):
        args.partial_rollout = True
        playing: Any = player(args)
        waiting = playing.model.admission
        plays = [start(sample_type(prompt=0, index=i, session_id=str(i))) for i in (0, 1)]

        async def one_waits() -> bool:
            return engine.held == waiting.held == 1

        await until(one_waits, "one episode samples, and the other waits")
        stopped = True
        await playing.abort()
        parked = [(await each)[0] for each in plays]
        assert all(map(is_aborted, parked)) and waiting.held == 0
        evaluated = await start(sample_type(prompt=0, index=2, session_id="2"), evaluation=True)
        stopped = False
        gate.set()
        samples = [(await start(sample))[0] for sample in parked]
    assert [sample.reward for sample in (evaluated, *samples)] == [1.0] * 3
    assert [metrics_of(sample) for sample in samples] == [[1, 0]] * 2


@pytest.mark.parametrize("mask", [False, True])
async def test_the_mask_covers_all_of_a_fork(sample_type: Any, tmp_path: Path, mask: bool) -> None:
    async with forking(tmp_path, faults=cut_once(2)) as (engine, args):
        args.partial_rollout, args.mask_offpolicy_in_partial_rollout = True, mask
        parked = await play(args, sample_type(prompt=0, index=0, session_id="s"))
        assert is_aborted(parked) and len(parked) == 1
        first = len(engine.log) if mask else 0
        samples = await play(args, parked)
    assert len(samples) > 1
    trained = [
        token
        for sample in samples
        for token, kept in zip(
            sample.tokens[-sample.response_length :], sample.loss_mask, strict=True
        )
        if kept
    ]
    assert trained == [token for entry in engine.log[first:] for token in entry.output_ids]


def test_a_turn_that_an_earlier_sequence_has_is_not_masked_again() -> None:
    """The second sequence repeats the first one's first turn as context."""
    first = sequence((1, 3, None), (4, 6, None), length=9)
    second = sequence((1, 3, "context"), (4, 7, None), (8, 9, None), length=9)
    masks = [trajectory.loss_mask.tolist() for trajectory in masked((first, second), 2, 2)]
    assert masks == [[0] * 9, [0, 0, 0, 0, 0, 0, 1, 0, 1]]


class Unreachable:
    """A worker that cannot be reached during its first episode, which its process plays on."""

    plays: list[asyncio.Future[Any]]

    def __init__(self, open_player: Any) -> None:
        self._opening = asyncio.ensure_future(open_player(AsyncExitStack()))

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
async def test_an_unreachable_process_may_play_an_episode_again(
    sample_type: Any, environments: Environments, monkeypatch: pytest.MonkeyPatch, parked: bool
) -> None:
    monkeypatch.setattr(ray_player, "RayWorker", Unreachable)
    monkeypatch.setattr(Unreachable, "plays", [], raising=False)
    monkeypatch.setattr(worker_pool, "_PAUSE", 0.0)
    faults = lambda request: Fault(abort_after=3) if parked else None
    async with serving(plays_the_reference, faults=faults) as (_, args):
        vars(args).update(partial_rollout=True, toolroll_workers=2)
        [sample] = await play(args, sample_type(prompt=0, index=0, session_id="s"))
        await asyncio.wait(Unreachable.plays)
        assert [call.exception() for call in Unreachable.plays] == [None, None]
        metrics = await player(args).parked_metrics()
        [again] = await play(args, sample) if parked else [sample]
    assert metrics == {"toolroll/parked": float(parked)}
    assert is_aborted(sample) if parked else sample.reward == 1.0
    assert metrics_of(again, "worker_deaths") == [1]
    assert len(environments.opened) == 2
    environments.check_all_closed()


# --- generate_rollout -----------------------------------------------------------------------------


async def test_a_rollout_continues_what_it_parked(rollout: Any, environments: Environments) -> None:
    """The samples of group 2 are held in different turns, and one is over before the rollout."""
    gate = asyncio.Event()

    def policy(request: PolicyRequest) -> Reply:
        group, position = map(int, request.routing_key.split("/"))
        held = group == 2 and request.call == position
        return Reply(says()(request), hold=gate if held else None, hold_after=2)

    async with serving(policy, weight_version="0") as (engine, args):
        vars(args).update(over_sampling_batch_size=3, partial_rollout=True)
        source = rollout.source(n=7)
        first = await rollout(args, source)
        [group] = source.buffer
        assert [sample.status.name for sample in group] == ["ABORTED"] * 5 + ["COMPLETED"] * 2
        assert all(sample.metadata["start_rollout_id"] == 0 for sample in group)
        assert first.metrics["toolroll/parked"] == 5
        engine.set_weight_version("1")
        args.over_sampling_batch_size = 2
        second = await rollout(args, source, 1)
    assert [group[0].group_index for group in first.samples] == [0, 1]
    assert [group[0].group_index for group in second.samples] == [2, 3]
    assert second.metrics["toolroll/parked"] == 0
    assert second.metrics["toolroll/resumes"] == 5 / 14
    assert {sample.reward for sample in flattened(second.samples)} == {1.0}
    continued = second.samples[0]
    assert len({tuple(sample.tokens) for sample in continued}) == 1, "one policy, one task"
    assert [len(set(sample.weight_versions)) for sample in continued] == [2] * 5 + [1] * 2
    assert len(environments.opened) == 7 * 4 == len(environments.closed)
    every_sampled_token_is_as_served([first, second], engine)
    train_data(flattened(second.samples))


@pytest.mark.parametrize("partial", [None, "restart"])
async def test_surplus_groups_go_back(rollout: Any, partial: str | None) -> None:
    """The finished groups of an earlier rollout are all over at once."""
    async with serving() as (_, args):
        vars(args).update(partial_rollout=True, toolroll_partial=partial)
        args.rollout_batch_size = args.over_sampling_batch_size = 3
        source = rollout.source(n=2)
        source.add_samples((await rollout(args, source)).samples)
        args.rollout_batch_size = 1
        groups = [*(await rollout(args, source, 1)).samples, *source.buffer]
    assert sorted(group[0].group_index for group in groups) == [0, 1, 2]
    train_data(flattened(groups))


async def test_a_rollout_continues_what_the_engine_aborts(
    rollout: Any, environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted group is played on in the same rollout, and is no failure, unless the engine
    aborts every request.
    """
    monkeypatch.setattr(training, "_MOST_ABORTED", 1)
    monkeypatch.setattr(training, "_MOST_CONTINUED", 3)
    async with serving(faults=cut_once()) as (_, args):
        vars(args).update(over_sampling_batch_size=1, partial_rollout=True)
        source = rollout.source(n=2)
        output = await rollout(args, source, 5)
    assert [group[0].group_index for group in output.samples] == [0, 1]
    samples = flattened(output.samples)
    assert [metrics_of(sample) for sample in samples] == [[1, 0]] * 4
    assert not any("drop" in name for name in output.metrics)
    assert output.metrics["toolroll/parked"] == 0 and source.buffer == []
    assert len(environments.opened) == len(environments.closed) == 4
    train_data(samples)
    environments.clear()
    async with serving(faults=lambda request: Fault(abort_after=1)) as (_, args):
        vars(args).update(over_sampling_batch_size=1, partial_rollout=True)
        source = rollout.source(n=1)
        with pytest.raises(RolloutError, match="could not be graded"):
            await rollout(args, source, 5)
        # Another group may be parked, and a later rollout gets it.
        assert len(environments.opened) - len(environments.closed) <= len(source.buffer)


async def test_an_error_in_a_group_closes_its_parked_episodes(
    rollout: Any, environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data source gets the group without the sessions of these episodes."""

    async def failing(args: Any, value: Any, *, evaluation: bool) -> Any:
        assert is_aborted(value)
        raise ValueError("the hook failed")

    install_hooks(monkeypatch, failing)
    async with serving(faults=cut_once()) as (_, args):
        vars(args).update(
            over_sampling_batch_size=2, partial_rollout=True, rollout_sample_hook_path="a.hook"
        )
        with pytest.raises(ValueError, match="the hook failed"):
            await rollout(args, rollout.source(n=2))
    assert environments.opened
    environments.check_all_closed()
