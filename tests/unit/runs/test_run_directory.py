"""A run's folder: it goes on where it stopped, refuses other settings, and names the software, the
model and the command that produced it, without secrets.
"""

import copy
import json
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command, toolroll
from support.results import content, episode
from support.source import ROOT

from toolroll import StopReason, UsageError
from toolroll.evaluation.run_config import RunConfig
from toolroll.evaluation.run_setup import prepare
from toolroll.rollout.runs import provenance as module
from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes, to_line
from toolroll.rollout.runs.provenance import (
    benchmark_packages,
    command_without_secrets,
    commit,
    extended,
    package_version,
    provenance,
    without_secrets,
)
from toolroll.rollout.runs.registry import _Configured, load_environment
from toolroll.rollout.runs.run_directory import RunDirectory, difference, read_settings
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, serve_in_thread

SETTINGS = {"temperature": 1.0, "seed": 0, "stop": None}


def refused(folder: Path, words: str, settings: Any = SETTINGS) -> None:
    with pytest.raises(UsageError, match=words), RunDirectory(folder, "pond", settings):
        pass


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"thesis.tex": ""}, r"holds other files \(thesis.tex\): name a new"),
        ({FILE_NAME: to_line(episode()).decode()}, r"no run.json with their settings"),
        ({"run.json": "{"}, "cannot be"),
        ({"run.json": "[]"}, "cannot be"),
        ({"run.json": '{"schema_version": 2}'}, "schema version 2"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refused(tmp_path, words)
    locked = {} if "thesis.tex" in files else {".lock": ""}
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == files | locked


def test_aborted_episodes_make_room_for_another_attempt(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        folder.append(episode("t-0"))
        folder.append(episode("t-1", reason=StopReason.ENGINE_ERROR))
        folder.append(episode("t-2"))
        with pytest.raises(UsageError, match=r"task t-0, sample 0 is already in "):
            folder.append(episode("t-0"))
    with RunDirectory(tmp_path, "lake", SETTINGS) as other:
        other.append(episode("t-0", env="lake", reason=StopReason.USER_ERROR))
    before = [content(found) for found in read_episodes(tmp_path)]
    with RunDirectory(tmp_path, "pond", SETTINGS) as folder:
        assert folder.done == {("t-0", 0), ("t-2", 0)}
        assert folder.dropped == 1
        folder.append(episode("t-1"))
        assert folder.summary.rewards == {"t-0": [1.0], "t-1": [1.0], "t-2": [1.0]}
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
    lake = {"stop": ("a", "b"), "path": Path("x")}
    for _ in range(2):  # what a setting becomes in JSON is no difference
        with RunDirectory(tmp_path, "lake", lake):
            pass
    assert read_settings(tmp_path) == {
        "pond": SETTINGS,
        "lake": {"stop": ["a", "b"], "path": repr(Path("x"))},
    }
    # not set and null are one
    assert difference({"a": 1}, {"a": 1, "b": None}) == []
    with RunDirectory(tmp_path, "pond", {"temperature": 1.0, "seed": 0}) as folder:
        assert len(folder.done) == 1


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


# --- which software, model and command produced a run ---------------------------------------------


async def test_a_run_names_its_software_its_model_and_its_command() -> None:
    async with (
        EmbeddedEngine(load_embedded_tokenizer(), lambda request: "Hi") as engine,
        AsyncExitStack() as stack,
    ):
        config = RunConfig(env="desk", engine=engine.url, model="embedded", parser="hermes")
        plan = await prepare(config, stack)
        command = ["toolroll", "--engine", "http://me:pw@host:1"]
        found = await provenance(plan.served, plan.factory, command)
        again = await provenance(plan.served, plan.factory, command)
        alone = await provenance(plan.served, command=command)
        assert plan.served is not None
        facts = await plan.served.engine.model_info()
    assert found["command"] == ["toolroll", "--engine", "http://***@host:1"]
    assert found["toolroll"] == package_version("toolroll")
    assert found["transformers"] == package_version("transformers")
    assert found["engine_model_path"] == facts.model_path is not None
    assert found["weight_version"] == facts.weight_version is not None
    assert found["sglang"] == facts.sglang_version is not None
    assert len(found["template_sha256"]) == len(found["tokenizer_sha256"]) == 64
    assert {**again, "date": found["date"]} == found
    assert {**alone, "date": found["date"]} == found | {"benchmark": {}}
    json.dumps(found)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--engine=http://me:pw@host:1/x", "--engine=http://***@host:1/x"),
        ('{"url": "http://a:b@c", "api_key": "sk-1", "n": 2}',
         '{"url": "http://***@c", "api_key": "***", "n": 2}'),
        ("http://host/v1?token=abc&x=1", "http://host/v1?token=***&x=1"),
        ("Authorization: Bearer abc", "Authorization: ***"),
        ("--api-key-env=OPENAI_API_KEY", "--api-key-env=OPENAI_API_KEY"),
        ("--max-new-tokens=5", "--max-new-tokens=5"),
        ("a@b", "a@b"),
        ('{"password": "my long pass", "n": 2}', '{"password": "***", "n": 2}'),
        (r'{"api_key": "a\"b", "n": 2}', '{"api_key": "***", "n": 2}'),
        ('{"api_key": ["sk-1", "sk-2"], "n": 2}', '{"api_key": ***, "n": 2}'),
        ("passwd=foo", "passwd=***"),
        ('{"judge": "sk-proj-abcdefghijklmnop"}', '{"judge": "***"}'),
        ("--model=Qwen/sk-8B", "--model=Qwen/sk-8B"),
    ],
)  # fmt: skip
def test_secrets_are_not_stored(word: str, shown: str) -> None:
    """Nor is a key in a word of its own."""
    assert without_secrets(word) == shown
    words = ["run.py", "--api-key", "abc", "--hf-token", "def", "--max-tokens", "5", word]
    hidden = ["run.py", "--api-key", "***", "--hf-token", "***", "--max-tokens", "5", shown]
    assert command_without_secrets([*words, "--secret"]) == [*hidden, "--secret"]


def test_the_commit_or_a_hash_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commit() or ""
    in_checkout = (ROOT / ".git").exists()
    pattern = r"[0-9a-f]{40}(-dirty)?" if in_checkout else r"files [0-9a-f]{16}"
    assert re.fullmatch(pattern, found)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "lib" / "site" / "a" / "b" / "c.py"))
    assert re.fullmatch(r"files [0-9a-f]{16}", commit() or "")


def test_the_benchmarks_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert benchmark_packages(load_environment("desk")) == {}
    bfcl = load_environment("bfcl/multi_turn_base")
    assert benchmark_packages(bfcl) == {"bfcl-eval": package_version("bfcl-eval")}
    desk = load_environment("desk")
    monkeypatch.setattr(desk, "packages", ("numpy",), raising=False)
    assert list(benchmark_packages(_Configured(desk, {"policy": "brief"}))) == ["numpy"]


def test_a_later_run_adds_what_differs() -> None:
    first = {"date": "1", "toolroll": "0.1", "sglang": "0.5"}
    assert extended([], first) == [first]
    assert extended([first], {**first, "date": "2"}) == [first]
    second = extended([first], {**first, "date": "2", "sglang": "0.6"})
    assert second == [first, {"date": "2", "sglang": "0.6"}]
    assert extended(second, {**first, "date": "3"})[2:] == [{"date": "3", "sglang": "0.5"}]


def test_a_folder_keeps_the_first_and_each_environments_own(tmp_path: Path) -> None:
    first = {"date": "1", "toolroll": "0.1"}
    (tmp_path / "run.json").write_text('{"schema_version":1,"environments":{"pond":{}}}')
    with RunDirectory(tmp_path, "pond", {}, provenance=first) as folder:  # it has none so far
        assert folder.provenance == [first]
    with RunDirectory(tmp_path, "lake", {"n": 1}, provenance=first | {"toolroll": "0.2"}):
        pass
    both = [first, {"date": "1", "toolroll": "0.3"}]
    with RunDirectory(tmp_path, "pond", {}, provenance=first | {"toolroll": "0.3"}) as folder:
        assert folder.provenance == both
    with RunDirectory(tmp_path, "pond", {}) as folder:
        assert folder.provenance == both
    recorded = json.loads((tmp_path / "run.json").read_text())["provenance"]
    assert recorded == {"pond": both, "lake": [{"date": "1", "toolroll": "0.2"}]}
    assert read_settings(tmp_path) == {"pond": {}, "lake": {"n": 1}}


# --- run.json with wrong types --------------------------------------------------------------------


WRONG: dict[tuple[Any, ...], Any] = {
    (): [],
    ("environments",): [],
    ("environments", "desk"): [7],
    ("environments", "desk", "model"): [],
    ("environments", "desk", "env_args"): [7],
    ("provenance",): True,
    ("provenance", "desk", 0): [],
    ("provenance", "desk", 0, "options"): [["env", "desk"]],
    ("planned",): {"desk": -1},
}
"""Values of wrong types, by their place."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer())) as engine:
        options = ["--tasks", 0, "--no-do-nothing", "--out", out, "--max-turns", 1]
        toolroll(*run_command(engine.url, *options))
    return out


def changed(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The record with `value` at `path`."""
    if not path:
        return value
    record = copy.deepcopy(record)
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


COMMANDS = {
    "view": ("view", "RUN"),
    "atif": ("export", "RUN", "--format", "atif", "--out", "OUT"),
    "parquet": ("export", "RUN", "--out", "OUT"),
    "compare": ("compare", "RUN", "BASE", "--page", "PAGE"),
    "regrade": ("regrade", "RUN", "--out", "OUT"),
    "run": ("run", "--from", "RUN", "--out", "OUT", "--engine", "ftp://nothing"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_record_is_refused_in_a_line(recorded: Path, tmp_path: Path, command: str) -> None:
    record = json.loads((recorded / "run.json").read_text())
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    names = {"RUN": run, "OUT": tmp_path / "out", "BASE": recorded, "PAGE": tmp_path / "page.html"}
    words = [names.get(word, word) for word in COMMANDS[command]]
    for path, value in WRONG.items():
        (run / "run.json").write_text(json.dumps(changed(record, path, value)))
        with pytest.raises(UsageError, match=r"run.json cannot be read \(.*\): repair it") as error:
            toolroll(*words)
        assert "\n" not in str(error.value)
