"""Hostile answers of the engine: refused, never trained, and no other episode's."""

import asyncio
import itertools
from typing import Any

import pytest
from support.episodes import agent, answers_of, judge_tokens, serving
from support.faults.size import FULL, sampled
from support.faults.tally import Tally, contents
from support.hostile import HOSTILE
from support.toy_environment import PondFactory, look

from toolroll.rollout.episode import Episode
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.runner import Runner, session_id
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import StopReason
from toolroll.testing import EmbeddedEngine, Fault, PolicyRequest, Reply

pytestmark = pytest.mark.faults

LOOKING = {"temperature": 1.0, "max_new_tokens": 256}
SHORT = {"temperature": 1.0, "max_new_tokens": 8, "stop": ["END"], "stop_token_ids": [9]}
JSON = {"Content-Type": "application/json"}
PONDS = 100 if FULL else 40
ERRORS = (301, 307, 400, 401, 403, 404, 405, 413, 422, 500, 501)
REFUSED: dict[str, Fault] = {
    **{name: Fault(garble=spoil) for name, (spoil, _) in HOSTILE.items()},
    "no body": Fault(status=200),
    "half a body": Fault(status=200, body=b'{"text": "x", "output_ids": [7, 8', headers=JSON),
    "a page": Fault(status=200, body=b"<html>Log in</html>"),
    "not UTF-8": Fault(status=200, body=b"\xff\xfe\x00"),
    "NaN": Fault(status=200, body=b'{"output_ids": [NaN], "meta_info": {}}'),
    "deeply nested": Fault(status=200, body=b"[" * 100_000),
    "20 MB of text": Fault(status=500, body=b"x" * 20_000_000),
    **{
        f"HTTP {status}": Fault(status=status, body=b'{"error": {"message": "no"}}')
        for status in ERRORS
    },
}
"""Answers that end their episode: no other attempt is made, or it gets the same answer."""
PASSING: dict[str, Fault] = {
    "dropped": Fault(drop=True),
    **{
        f"HTTP {status}": Fault(status=status, body=b"busy")
        for status in (408, 425, 429, 500, 502, 503, 504)
    },
    "another's": Fault(garble=HOSTILE["another's id"][0]),
}
"""Faults that pass: the next attempt gets an honest answer."""


def speak(request: PolicyRequest) -> Any:
    """Look around, or say three tokens in a hostile session."""
    return (
        Reply(output_ids=[7, 8, 9]) if request.routing_key.startswith("hostile/") else look(request)
    )


async def play(served: Model, name: str, tasks: int, params: dict[str, Any]) -> list[Episode]:
    """Play `tasks` ponds as the environment `name`."""
    factory, found = PondFactory(tasks, name=name), list[Episode]()
    settings = RunSettings(sampling_params=params, concurrency=16, max_turns=8)
    await Runner(factory, lambda: agent(served), settings).run(factory.tasks("test"), found.append)
    return found


def judge(engine: EmbeddedEngine, episodes: list[Episode]) -> None:
    """Check the tokens of each episode by the engine's log; garbled answers are in it too."""
    for episode in episodes:
        key = session_id(episode.env, episode.task_id, episode.sample)
        answers = len(answers_of(engine, key))
        turns = sum(len(trajectory.turns) for trajectory in episode.result.trajectories)
        judge_tokens(episode.result.trajectories, engine, key, refused=answers - turns)


async def test_a_hostile_answer_ends_its_own_episode(
    tokenizer: Any, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    names = sampled(REFUSED, 50)

    def faults(request: PolicyRequest) -> Fault | None:
        env, _, task = request.routing_key.partition("/t-")
        return REFUSED[names[int(task.partition("#")[0])]] if env == "hostile" else None

    async with serving(tokenizer, speak) as (_, served):
        alone = contents(await play(served, "pond", PONDS, LOOKING))
    config = {"retries": 1}
    async with serving(tokenizer, speak, faults=faults, config=config) as (engine, served):
        good, bad = await asyncio.gather(
            play(served, "pond", PONDS, LOOKING), play(served, "hostile", len(names), SHORT)
        )
        judge(engine, [*good, *bad])
    tally.tried(len(names))
    tally.played(good, alone, alone)
    tally.played(bad, [(f"t-{n}", 0) for n in range(len(names))], {})
    tally.texts(caplog.text)
    tally.check()
    assert len(REFUSED) >= 100
    ends = {names[episode.task_index]: episode.result for episode in bad}
    stopped = {name: end.stop_reason for name, end in ends.items()}
    assert stopped == dict.fromkeys(names, StopReason.ENGINE_ERROR)
    trained = {name: end.trajectories[-1:] for name, end in ends.items()}
    assert not [name for name, last in trained.items() if last and last[0].trained_tokens]


async def test_a_fault_that_passes_changes_nothing(
    tokenizer: Any, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tokenizer, speak) as (_, served):
        alone = contents(await play(served, "pond", PONDS, LOOKING))
    kinds, injected = itertools.cycle(PASSING.values()), 0

    def faults(request: PolicyRequest) -> Fault | None:
        nonlocal injected
        if request.index % 5:
            return None
        injected += 1
        return next(kinds)

    config = {"retries": 11}
    async with serving(tokenizer, speak, faults=faults, config=config) as (engine, served):
        found = await play(served, "pond", PONDS, LOOKING)
        judge(engine, found)
    tally.tried(injected)
    tally.played(found, alone, alone)
    tally.texts(caplog.text)
    tally.check()
    assert injected > len(PASSING)
