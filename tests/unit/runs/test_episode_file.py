"""The episode file: what is read is what was written, wherever the writing was cut off, and whoever
gave a value: it is refused before the episode is written, or it is in the line that a reader takes.
What an environment's methods return is in `tests/unit/agents/test_returned.py`.
"""

import asyncio
import contextlib
import copy
import dataclasses
import io
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from rich.console import Console
from support.client_fields import FIELDS, HOLE
from support.endpoints import Bench, endpoint
from support.http import completion
from support.recorded import CHAT, USER
from support.results import content, episode, trajectory
from support.scripted_runs import Scripted, ScriptedFactory, play
from support.tiers import costly

from toolroll import Action, Episode, GenerateRequest, InteractionResult, Session, StopReason, Task
from toolroll.cli.compare import compare_folders
from toolroll.cli.display import remarks, results_table
from toolroll.cli.export import export
from toolroll.cli.view import view
from toolroll.evaluation.compare import Question
from toolroll.evaluation.export.dataset import sample_rows
from toolroll.evaluation.report import report, write_summary
from toolroll.parsers.types import ToolCall
from toolroll.rollout.engine import parse_completion
from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.runs.episode_file import (
    FILE_NAME,
    EpisodeStore,
    cut_torn_line,
    from_line,
    read_episodes,
    to_line,
)
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.runs.runner import checked_result
from toolroll.rollout.session.trajectory_json import to_json


def write(folder: Path, *samples: int) -> Path:
    with EpisodeStore(folder) as store:
        for sample in samples:
            store.append(episode(sample=sample))
    return folder / FILE_NAME


def same_arrays(read: Episode, written: Episode) -> None:
    """The arrays of the episodes' trajectories are equal, with their types."""
    for mine, theirs in zip(read.result.trajectories, written.result.trajectories, strict=True):
        for name in ("input_ids", "loss_mask", "logprobs"):
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


def test_what_is_read_is_what_was_written() -> None:
    """The logprobs of what was not sampled are null."""
    assert content(episode())["trajectories"][0]["logprobs"][:5] == [None, None, None, None, -0.25]
    forked = [trajectory(), trajectory(9, [(5, 9)], fork_reason="the template rewrote it")]
    info = {"text": "Zürich 東京 </script> \n \u2028", "nested": {"a": [1, None]}}
    silent = [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]
    for written in (
        episode(trajectories=forked, info=info),
        episode(reason=StopReason.ENGINE_ERROR, trajectories=[]),
        episode(reward=0.5, messages=silent),
    ):
        line = to_line(written)
        assert line.count(b"\n") == 1
        again = from_line(line)
        assert content(again) == content(written)
        same_arrays(again, written)
        turns = [part.turns for part in written.result.trajectories]
        assert [part.turns for part in again.result.trajectories] == turns
        assert again.result.response == written.result.response


@given(cut=st.integers(min_value=0))
def test_a_file_cut_at_any_byte_loses_the_line_in_flight_only(cut: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write(folder, 0, 1, 2)
        whole = file.read_bytes()
        cut %= len(whole) + 1
        file.write_bytes(whole[:cut])
        left = whole[:cut].count(b"\n")
        assert [each.sample for each in read_episodes(folder)] == list(range(left))
        write(folder, *range(left, 3))
        assert file.read_bytes() == whole


def test_cutting_says_how_much(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    assert cut_torn_line(file) == 0
    file.write_bytes(b"a\n" + b"x" * 200_000)  # longer than one block of the search
    assert cut_torn_line(file) == 200_000
    assert file.read_bytes() == b"a\n"
    file.write_bytes(b"no line at all")
    assert cut_torn_line(file) == 14
    assert file.read_bytes() == b""


def test_a_broken_line_inside_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=f"{path} is neither the folder of a run .* nor its"):
            next(read_episodes(path))
    file = write(tmp_path, 0, 1)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0][: len(lines[0]) // 2] + b"\n" + lines[1])
    with pytest.raises(UsageError, match="line 1, is not a valid episode"):
        list(read_episodes(tmp_path))


@dataclasses.dataclass
class Note:
    text: str
    number: int


class Model(BaseModel):
    text: str


EXPORTS = ("atif", *(("parquet",) if find_spec("pyarrow") else ()))
"""`make test` installs no pyarrow."""
HOSTILE: list[Any] = [
    None, True, -1, 0.5, 2**31, 2**63, 2**64, 1e18, 1e99, 1e101, 1e308, -1e308, "", "inf", "nan",
    "1" * 5000, "\ud800",
    [], {}, [1], {"a": 1}, [[]], [None], {"": {}}, 10**400, math.nan, math.inf,
    "deep",
]  # fmt: skip
DEEP: Any = []
for _ in range(300):
    DEEP = {"a": [DEEP]}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in `value`, and of one key that each object lacks."""
    yield path
    if isinstance(value, dict):
        yield (*path, "more")
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for at, item in enumerate(value[:2]):
            yield from places(item, (*path, at))


def written(changes: Mapping[tuple[Any, ...], Any]) -> bytes:
    """The line of an episode in which the values at the paths in `changes` are replaced."""
    data = [json.loads(to_line(FULL))]
    for path, value in changes.items():
        holder: Any = data
        with contextlib.suppress(KeyError, IndexError, TypeError):  # changed before
            for key in (0, *path)[:-1]:
                holder = holder[key]
            holder[(0, *path)[-1]] = DEEP if value == "deep" else copy.deepcopy(value)
    return json.dumps(data[0]).encode() + b"\n"


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FULL = episode(
    "t-1",
    messages=[{"role": "assistant", "content": "Hi.", "tool_calls": [CALL]}],
    metrics={
        "turns": 2.0, "tool_calls": 2.0, "invalid_calls": 1.0, "invalid_calls/invalid_json": 1.0,
        "executed_calls/f": 1.0, "tool_errors": 1.0, "tool_errors/f": 1.0, "user_calls": 1.0,
        "token_mismatches/prompt": 1.0, "seconds": 1.0, "reruns": 1.0, "env/turns": 3.0,
    },
    info={
        "bad_calls": [{"message": 0, "call": 0, "status": "invalid_json"}],
        "error": {"type": "E", "message": "m"},
        "reward_info": {"a": {"b": 1}},
        "trainable": True,
        "forks": [],
    },
)  # fmt: skip
PLACES = [place for place in places(json.loads(to_line(FULL))) if place != ("schema_version",)]


@given(
    st.dictionaries(
        st.sampled_from(PLACES),
        st.sampled_from(HOSTILE) | st.floats() | st.integers() | st.text(max_size=3),
        min_size=1,
        max_size=3,
    )
)
@example({("metrics", "turns"): 1e308})
@example({("metrics", "invalid_calls"): 3.0, ("metrics", "tool_calls"): 0.0})
@example({("metrics", "executed_calls/f"): 0.5})
@example({("info", "bad_calls"): 5})
@example({("messages", 0, "tool_calls"): 5})
@example({("info", "reward_info"): "deep"})
@example({("info", "forks"): "deep"})
@example({("task_id",): "1" * 5000})
@example({("schema_version",): "2"})
@example({("schema_version",): None})
@example({("sample",): 2**63 - 1})
@example({("stop_reason",): "engine_error"})
@example({("stop_reason",): "engine_error", ("status",): "aborted"})
@example({(): 5})
@settings(deadline=None)
def test_no_line_breaks_its_folder(changes: dict[tuple[Any, ...], Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RunDirectory(folder, "pond", {}) as run:
            run.append(episode("t-0"))
        line = written(changes)
        with (folder / "episodes.jsonl").open("ab") as file:
            file.write(line + to_line(episode("t-2", reward=0.0)))

        bad: list[str] = []
        stored = list(read_episodes(folder, on_bad_line=bad.append))
        assert len(stored) + len(bad) == 3
        assert all("line 2, is not a valid episode: " in message for message in bad)
        dropped = 0
        part: dict[str, Any] = {}
        for _ in range(2):  # what the first resume writes does not break the second
            with RunDirectory(folder, "pond", {}) as run:
                assert run.bad_lines == bad
                dropped += run.dropped
                assert {("t-0", 0), ("t-2", 0)} <= run.done
                if ("t-9", 0) not in run.done:
                    run.append(episode("t-9"))
                part = report(run.summary, planned={"t-0": 1, "t-2": 1, "t-9": 1}, seconds=1.0)
                write_summary(folder, {"pond": part})
        Console(file=io.StringIO()).print(results_table({"pond": part}))
        remarks("pond", part)
        _, count, messages, _ = view(folder, out=None, tokenizer=None, tokens=9)
        assert count + len(bad) + dropped == 4
        assert messages[: len(bad)] == bad
        for kind in EXPORTS:
            messages = export(folder, kind, folder / kind, "pond")
            assert messages[len(messages) - len(bad) :] == bad


def test_a_string_that_no_encoding_writes_loses_no_episode() -> None:
    """Lone surrogates, integers beyond 64 bits, and what is in itself: each would end the run."""
    ring: list[Any] = []
    ring.append(ring)
    info: dict[Any, Any] = {
        "pair \ud83d\ude00": "lone \udcff",
        "numbers": [2**64 - 1, 2**64, -(2**63) - 1, True, None, 0.5],
        "array": np.arange(3),
        "note": Note("\ud800", 2**70),
        "model": Model.model_construct(text="\ud800"),
        "set": {"\udcff"},
        (1, "\udcff"): Path("\udcff"),
        7: "seven",
    }
    said = [{"role": "user", "content": "bad \udcff name"}, {"role": "assistant", "content": "Ok."}]
    written = episode(messages=said, info=info)
    again = from_line(to_line(written))
    assert again.result.messages == [{"role": "user", "content": "bad \ufffd name"}, said[1]]
    expected = {
        "pair 😀": "lone \ufffd",
        "numbers": [2**64 - 1, str(2**64), str(-(2**63) - 1), True, None, 0.5],
        "array": [0, 1, 2],
        "note": {"text": "\ufffd", "number": str(2**70)},
        "model": {"text": "\ufffd"},
        "set": ["\ufffd"],
        "7": "seven",
    }
    assert {name: again.result.info[name] for name in expected} == expected
    same_arrays(again, written)
    assert "[[...]]" in to_line(episode(info={"ring": ring})).decode()


# --- whatever an engine, an environment, an agent or a client gave --------------------------------


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
"""What a client can send."""
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
