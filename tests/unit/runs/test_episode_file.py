"""The episode file: what is read is what was written, wherever the writing was cut off."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from rich.console import Console
from support.results import content, episode, trajectory

from toolroll.cli.display import remarks, results_table
from toolroll.cli.export import export
from toolroll.cli.view import view
from toolroll.evaluation.report import report, write_summary
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import (
    FILE_NAME,
    EpisodeStore,
    cut_torn_line,
    from_line,
    read_episodes,
    to_line,
)
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.types import StopReason


def write(folder: Path, *samples: int) -> Path:
    with EpisodeStore(folder) as store:
        for sample in samples:
            store.append(episode(sample=sample))
    return folder / FILE_NAME


def test_what_is_read_is_what_was_written() -> None:
    forked = [trajectory(), trajectory(9, [(5, 9)], fork_reason="the template rewrote it")]
    for found in (
        episode(
            trajectories=forked,
            info={"text": "Zürich 東京 </script> \n \u2028", "nested": {"a": [1, None]}},
        ),
        episode(reason=StopReason.ENGINE_ERROR, trajectories=[]),
        episode(
            reward=0.5,
            messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}],
        ),
    ):
        line = to_line(found)
        assert line.count(b"\n") == 1
        again = from_line(line)
        assert content(again) == content(found)
        for mine, theirs in zip(again.result.trajectories, found.result.trajectories, strict=True):
            for name in ("input_ids", "loss_mask", "logprobs"):
                assert getattr(mine, name).dtype == getattr(theirs, name).dtype
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            assert mine.turns == theirs.turns
        assert again.result.response == found.result.response


def test_logprobs_of_what_was_not_sampled_are_null() -> None:
    assert content(episode())["trajectories"][0]["logprobs"][:5] == [None, None, None, None, -0.25]


@given(cut=st.integers(min_value=0))
def test_a_file_cut_at_any_byte_loses_the_line_in_flight_only(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    file = write(folder, 0, 1, 2)
    whole = file.read_bytes()
    cut %= len(whole) + 1
    file.write_bytes(whole[:cut])
    left = whole[:cut].count(b"\n")
    assert [found.sample for found in read_episodes(folder)] == list(range(left))
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


def test_a_broken_line_inside_is_never_passed_over(tmp_path: Path) -> None:
    file = write(tmp_path, 0, 1)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0][: len(lines[0]) // 2] + b"\n" + lines[1])
    with pytest.raises(UsageError, match="line 1, is not a valid episode"):
        list(read_episodes(tmp_path))


def test_a_missing_file_is_refused_in_words(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=f"{path} is neither the folder of a run .* nor its"):
            next(read_episodes(path))


def test_another_schema_version_is_refused() -> None:
    line = to_line(episode()).replace(b'"schema_version":1', b'"schema_version":99')
    with pytest.raises(UsageError, match="schema version 99; this toolroll reads 1"):
        from_line(line)


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
    info = {
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
    found = episode(messages=said, info=info)  # type: ignore[arg-type]
    again = from_line(to_line(found)).result
    assert again.messages == [{"role": "user", "content": "bad \ufffd name"}, said[1]]
    assert again.info["pair 😀"] == "lone \ufffd"
    assert again.info["numbers"] == [2**64 - 1, str(2**64), str(-(2**63) - 1), True, None, 0.5]
    assert again.info["array"] == [0, 1, 2]
    assert again.info["note"] == {"text": "\ufffd", "number": str(2**70)}
    assert (again.info["model"], again.info["set"], again.info["7"]) == (
        {"text": "\ufffd"},
        ["\ufffd"],
        "seven",
    )
    for mine, theirs in zip(again.trajectories, found.result.trajectories, strict=True):
        for name in ("input_ids", "loss_mask", "logprobs"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    assert "[[...]]" in to_line(episode(info={"ring": ring})).decode()
