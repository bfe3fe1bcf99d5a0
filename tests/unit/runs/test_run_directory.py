"""A run's folder: it goes on where it stopped, and refuses other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.results import content, episode

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes
from toolroll.rollout.runs.run_directory import RunDirectory, difference, read_settings
from toolroll.rollout.types import StopReason

SETTINGS = {"temperature": 1.0, "seed": 0, "stop": None}


def test_a_run_goes_on(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        assert folder.done == frozenset()
        for sample in range(3):
            folder.append(episode(sample=sample, reward=float(sample == 0)))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"schema_version":1,"env":"po')
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        assert folder.done == {("t-0", 0), ("t-0", 1), ("t-0", 2)}
        assert folder.dropped == 0
        assert (folder.summary.episodes, folder.summary.passed) == (3, 1)
        folder.append(episode("t-1"))
        assert folder.summary.rewards == {"t-0": [1.0, 0.0, 0.0], "t-1": [1.0]}
    assert [found.task_id for found in read_episodes(tmp_path)] == ["t-0", "t-0", "t-0", "t-1"]


def test_nothing_stands_there_twice(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        folder.append(episode())
        with pytest.raises(UsageError, match=r"task t-0, sample 0 is already in "):
            folder.append(episode())


def refused(folder: Path, words: str, settings: Any = SETTINGS) -> None:
    with pytest.raises(UsageError, match=words), RunDirectory(folder, "pond", settings):
        pass


def test_what_a_setting_becomes_in_json_is_no_difference(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDirectory(tmp_path, "pond", {"stop": ("a", "b"), "path": Path("x")}):
            pass
    assert difference({"a": 1}, {"a": 1, "b": None}) == []


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    refused(tmp_path, r"holds other files \(thesis.tex\): name a new")
    assert [found.name for found in tmp_path.iterdir()] == ["thesis.tex"]


def test_aborted_episodes_make_room_for_another_attempt(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        folder.append(episode("t-0"))
        folder.append(episode("t-1", reason=StopReason.ENGINE_ERROR))
        folder.append(episode("t-2"))
    with RunDirectory(tmp_path, "lake", SETTINGS) as other:
        other.append(episode("t-0", env="lake", reason=StopReason.USER_ERROR))
    before = [content(found) for found in read_episodes(tmp_path)]
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        assert folder.done == {("t-0", 0), ("t-2", 0)}
        assert folder.dropped == 1
        assert folder.summary.episodes == 2
        folder.append(episode("t-1"))
    after = list(read_episodes(tmp_path))
    # other environments' stay
    assert [content(found) for found in after[:3]] == [before[0], before[2], before[3]]
    assert (after[3].task_id, after[3].result.reward) == ("t-1", 1.0)


def test_other_settings_are_refused_with_the_difference(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        folder.append(episode())
    before = (tmp_path / FILE_NAME).read_bytes()
    words = r'stop: recorded not set, now \["a"\]\n  temperature: recorded 1.0, now 0.7'
    refused(tmp_path, words, {"temperature": 0.7, "seed": 0, "stop": ["a"]})
    assert (tmp_path / FILE_NAME).read_bytes() == before
    # another environment's settings are its own
    with RunDirectory(tmp_path, "lake", {"temperature": 0.7}):
        pass
    assert read_settings(tmp_path) == {"pond": SETTINGS, "lake": {"temperature": 0.7}}
    # not set and null are one
    with RunDirectory(tmp_path, "pond", {"temperature": 1.0, "seed": 0}) as folder:
        assert len(folder.done) == 1


def test_episodes_of_unknown_settings_are_refused(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        folder.append(episode())
    (tmp_path / "run.json").unlink()
    refused(tmp_path, r"no run.json with their settings")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be"), ("[]", "cannot be"), ('{"schema_version": 2}', "schema version 2")],
)
def test_an_unreadable_settings_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.json").write_text(text)
    refused(tmp_path, words)


@pytest.mark.parametrize("line", [1, 2])
def test_episodes_of_another_version_are_refused(tmp_path: Path, line: int) -> None:
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        folder.append(episode("t-0"))
        folder.append(episode("t-1", reason=StopReason.ENGINE_ERROR))
    file = tmp_path / FILE_NAME
    lines = file.read_bytes().splitlines(keepends=True)
    for number in range(line - 1, 2):
        lines[number] = lines[number].replace(b'"schema_version":1', b'"schema_version":2')
    file.write_bytes(b"".join(lines))
    words = rf"{FILE_NAME}, line {line}: .*version 2; this toolroll reads 1"
    refused(tmp_path, words)
    with pytest.raises(UsageError, match=words):
        list(read_episodes(tmp_path, on_bad_line=lambda message: None))
    assert file.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_mistake_before_the_first_episode_does_not_bind(tmp_path: Path, aborted: bool) -> None:
    with RunDirectory(tmp_path, "pond", {"top_k": -7}, provenance={"date": "1", "n": 1}) as folder:
        if aborted:
            folder.append(episode(reason=StopReason.ENGINE_ERROR))
    with RunDirectory(tmp_path, "pond", {"top_k": 5}, provenance={"date": "2"}) as folder:
        assert folder.provenance == [{"date": "2"}]
        folder.append(episode())
    assert read_settings(tmp_path) == {"pond": {"top_k": 5}}
    assert [one.result.status.value for one in read_episodes(tmp_path)] == ["completed"]
    refused(tmp_path, "was started with other settings", {"top_k": 6})
