"""What is written can be read, whatever an engine, an environment, a client or a judge gave: a
value is refused before the episode is written, or it is in the line that a reader takes. What an
environment's methods return is in `tests/unit/agents/test_returned.py`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.client_fields import FIELDS, HOLE
from support.endpoints import Bench, endpoint
from support.http import completion
from support.recorded import CHAT, USER
from support.results import content, episode, trajectory
from support.scripted_runs import Scripted, ScriptedFactory, play
from support.tiers import costly

from toolroll import Action, Episode, GenerateRequest, InteractionResult, StopReason, Task
from toolroll.agents.chat_client import ChatClient
from toolroll.cli.compare import compare_folders
from toolroll.cli.view import view
from toolroll.evaluation.compare import Question
from toolroll.evaluation.export.dataset import sample_rows
from toolroll.evaluation.judge import Judge
from toolroll.parsers.types import ParsedReply, ToolCall
from toolroll.rollout.engine import parse_completion
from toolroll.rollout.errors import CompletionError, EnvironmentFailure, UsageError
from toolroll.rollout.runs.episode_file import from_line, read_episodes, to_line
from toolroll.rollout.runs.runner import checked_result
from toolroll.rollout.session import Session
from toolroll.rollout.session.trajectory_json import to_json

PLAIN = st.sampled_from(
    [None, True, -1, 0, 1, 2, 2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 10**400]
) | st.sampled_from([-0.0, 0.5, 1e15, 1e20, 1e101, 1e308, float("nan"), float("inf")])
NUMBERS = PLAIN | st.sampled_from([np.float32(0.5), np.int64(7)])
TEXTS = st.sampled_from(["", "x", "\ud800", "\x00", "\u2028", "🦆" * 100])
ANY = NUMBERS | TEXTS | st.lists(NUMBERS | TEXTS, max_size=2) | st.dictionaries(TEXTS, NUMBERS)


def nested(levels: int) -> Any:
    """A list in a list, and so on."""
    return [nested(levels - 1)] if levels else "x"


JSON = (
    PLAIN
    | TEXTS
    | st.lists(PLAIN | TEXTS, max_size=2)
    | st.dictionaries(TEXTS, PLAIN, max_size=2)
    | st.integers(90, 260).map(nested)
)
"""What a client or a judge can send."""
ANSWER_FIELDS = (
    "prompt_tokens completion_tokens cached_tokens weight_version weight_versions finish_reason "
    "e2e_latency output_token_logprobs output_top_logprobs"
).split()
RESULT_OF_AGENT = "prompt reward messages info metrics step_rewards tools".split()
TURN_FIELDS = [f"{name} of a turn" for name in "reward latency prompt_tokens matched".split()]


def read_back(written: Episode) -> Episode:
    again = from_line(to_line(written))
    assert content(again) == content(from_line(to_line(again)))
    return again


@given(name=st.sampled_from(ANSWER_FIELDS), value=ANY)
def test_an_engines_answer(name: str, value: Any) -> None:
    asked = GenerateRequest(np.array([1, 2, 3], dtype=np.int32), {}, "s")
    try:
        found = parse_completion(completion([7, 8], **{name: value}), asked)
    except CompletionError:
        return
    session = Session("s")
    session.sample(found, {}, after=session.observe(asked.input_ids, after=None))
    trajectories = tuple(session.trajectories())
    result = InteractionResult.of(
        trajectories, messages=[], stop_reason=StopReason.DONE, reward=1.0, prompt="", info={}
    )
    [again] = read_back(Episode("e", "t", 0, 0, 0, result)).result.trajectories
    assert again.turns == trajectories[0].turns


@given(index=ANY, name=ANY, arguments=ANY)
def test_an_environments_tasks(index: Any, name: Any, arguments: Any) -> None:
    factory: Any = ScriptedFactory(lambda: Scripted(lambda method, task: None), count=1)
    factory.tasks = lambda split: [Task("t-0", index, split)]
    factory.reference = lambda task: [Action("", (ToolCall("c", name, arguments),))]
    try:
        [written] = asyncio.run(play(factory))
    except UsageError as error:
        assert "the index of the task 't-0' is" in str(error)
        return
    read_back(written)


@given(name=st.sampled_from([*RESULT_OF_AGENT, *TURN_FIELDS]), value=ANY)
@example(name="step_rewards", value=[None])
@example(name="reward of a turn", value=2e100)  # the sum of two steps
def test_an_agents_result(name: str, value: Any) -> None:
    part, (field, _, of_turn) = trajectory(), name.partition(" ")
    if of_turn:
        part = replace(part, turns=(replace(part.turns[0], **{field: value}), *part.turns[1:]))
    solved = episode(trajectories=[part]).result
    if not of_turn:
        setattr(solved, field, value)
    try:
        checked = checked_result(solved)
    except (AttributeError, TypeError, ValueError):
        return
    again = read_back(Episode("e", "t", 0, 0, 0, checked)).result
    assert again.trajectories[0].turns == part.turns if of_turn else again.reward == checked.reward


async def fill(bench: Bench, filled: list[tuple[str, Any]]) -> dict[str, Any]:
    """Send each of the `FIELDS` with its value, and return the sessions."""
    assert (await bench.post(CHAT.format("s0"), {"messages": [USER]}))[0] == 200
    assert (await bench.post("/sessions/s0/reward", {"reward": 1}))[0] == 200
    for number, (name, value) in enumerate(filled):
        path, body = FIELDS[name]
        data = json.dumps(body).replace(json.dumps(HOLE), json.dumps(value))
        status, answer = await post(bench, path.format(f"s{number % 3}"), data)
        assert status < 500, (name, value, answer)
        if path == "/sessions" and status == 201:
            made = CHAT.format(answer["session_id"])
            status, answer = await bench.post(made, {"messages": [USER]})
            assert status < 500, (name, value, answer)
    return await recorded(bench)


async def post(bench: Bench, path: str, data: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    async with bench.http.post(bench.url + path, data=data, headers=headers) as response:
        return response.status, await response.json()


async def recorded(bench: Bench) -> dict[str, Any]:
    """What each session with an answer trains, its reward and its info."""
    kept = ("trajectories", "reward", "info")
    names = [live.id for live in bench.endpoint.sessions.all() if live.trace]
    found = {name: await bench.get(f"/sessions/{name}/trajectories") for name in names}
    return {name: {key: one[key] for key in kept} for name, one in found.items()}


@pytest.mark.slow
@costly()
@example(filled=[("reward", 1e101)])
@given(filled=st.lists(st.tuples(st.sampled_from([*FIELDS]), JSON), max_size=25))
def test_a_clients_requests(tokenizer: Any, filled: list[tuple[str, Any]]) -> None:
    async def run(out: Path) -> dict[str, Any]:
        async with endpoint(tokenizer, lambda request: "Hello.", out=out) as bench:
            before = await fill(bench, filled)
        async with endpoint(tokenizer, lambda request: "Hello.", out=out) as bench:
            assert await recorded(bench) == before
            assert bench.endpoint.store is not None
            bench.endpoint.store.finish_at_end = True
        return before

    with TemporaryDirectory() as folder:
        out = Path(folder)
        before = asyncio.run(run(out))
        found = {one.task_id: one.result for one in read_episodes(out)}
        assert {
            name: [to_json(part) for part in one.trajectories] for name, one in found.items()
        } == {name: one["trajectories"] for name, one in before.items()}
        for name, one in before.items():
            assert found[name].reward == one["reward"]
            assert found[name].info == {"session": found[name].info["session"], **one["info"]}
        assert view(out, out=None, tokenizer=None, tokens=10)[1] == len(before)
        assert {row["task_id"] for row in sample_rows(read_episodes(out))} <= before.keys()
        assert compare_folders([out, out], Question())[1] == []  # no line is left out


@given(score=JSON, reason=JSON, rule=ANY)
@example(score=1.0, reason="\x00", rule=10**400)
def test_a_judges_verdict(score: Any, reason: Any, rule: Any) -> None:
    said = json.dumps({"reason": reason, "score": score})

    async def complete(self: Any, request: Any) -> Any:
        return SimpleNamespace(reply=ParsedReply(said))

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatClient, "complete", complete)
        settings = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "cache": f"{folder}/cache"}
        record = [{"role": "user", "content": said}]
        try:
            step = asyncio.run(Judge("x", **settings).grade(record, rule=rule))
        except EnvironmentFailure:
            return
        patch.undo()  # the cache has it
        assert asyncio.run(Judge("x", **settings).grade(record, rule=rule)) == step
    act = lambda method, task: step if method == "step" else None
    [written] = asyncio.run(play(ScriptedFactory(lambda: Scripted(act), count=1)))
    again = read_back(written).result
    assert (again.reward, again.info["reward_reason"]) == (step.reward, reason)
    assert again.info["judge"]["score"] == score
