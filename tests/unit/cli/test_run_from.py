"""`toolroll run --from`: the same run again, and what differs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.commands import toolroll
from support.results import content

from toolroll import UsageError, read_episodes
from toolroll.evaluation.run_config import RunConfig
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.testing import EmbeddedEngine, load_engine, serve_in_thread


@contextmanager
def started() -> Iterator[EmbeddedEngine]:
    """A new engine, which samples the model in the package."""
    with serve_in_thread(load_engine(desk_model_path(), seed=5, keep_log=False)) as served:
        yield served


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("recorded") / "run"
    options = "--model desk-1m --parser hermes --tasks 0-2 --samples 2 --concurrency 1".split()
    options += "--no-do-nothing --max-new-tokens 96 --env-args".split()
    with started() as engine:
        command = ["run", "desk", "--engine", engine.url, "--out", out, *options]
        toolroll(*command, '{"policy": "brief"}')
        yield out


def episodes(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (found.task_id, found.sample): content(found, circumstances=False)
        for found in read_episodes(folder)
    }


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_the_same_run_again_has_the_same_episodes(recorded: Path, tmp_path: Path) -> None:
    with started() as engine:
        options = ["--engine", engine.url, "--out", tmp_path]
        result = toolroll("run", "--from", recorded / "run.json", *options)
    assert "desk: different from the recorded run: nothing" in result.stdout
    assert len(episodes(recorded)) == 6
    assert episodes(tmp_path) == episodes(recorded)
    assert settings(tmp_path)["environments"] == settings(recorded)["environments"]


def test_what_differs_is_printed(recorded: Path, tmp_path: Path) -> None:
    changed = settings(recorded)
    changed["provenance"]["desk"][0]["transformers"] = "1.0"
    changed["provenance"]["desk"].append({"date": "2026-01-01", "regraded": "out/base"})
    (tmp_path / "run.json").write_text(json.dumps(changed))
    options = ["--tasks", 1, "--samples", 1, "--max-turns", 2]
    result = toolroll("run", "desk", "--from", tmp_path, *options)
    lines = [line for line in result.stdout.splitlines() if "different from" in line]
    assert [line.rpartition("run: ")[2].partition(",")[0] for line in lines] == [
        "max_turns: recorded 30",
        'regraded: recorded "out/base"',
        'transformers: recorded "1.0"',
    ]
    assert "desk: 1/1" in result.stdout


def test_what_cannot_be_played_again_is_named(recorded: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([], "name an environment"),
        (["--from", tmp_path], "name one of its environments: it has none"),
        (["tau2/retail", "--from", recorded], "name one of its environments: desk"),
    ):
        with pytest.raises(UsageError, match=words):
            toolroll("run", *arguments)
    changed = settings(recorded)
    changed["provenance"]["desk"][0]["options"]["engine"] = "http://***@127.0.0.1:1"
    (tmp_path / "run.json").write_text(json.dumps(changed))
    with pytest.raises(UsageError, match=r"//\*\*\*@127.0.0.1:1 lacks its secret: give --engine"):
        toolroll("run", "--from", tmp_path, "--engine-timeout", 0)


def test_what_is_recorded_has_no_passwords() -> None:
    address = "http://user:secret@127.0.0.1:1"
    config = RunConfig(env="desk", model="tiny", engine=address, user_url=f"{address}/v1")
    assert "secret" not in json.dumps(config.options)
    assert config.options["engine"] == "http://***@127.0.0.1:1"


@pytest.mark.parametrize(
    "case",
    [
        ("env", "/tmp/gone.py:Env", ["/tmp/gone.py:Env"]),
        ("env", "gone:Env", ["gone:Env"]),
        ("agent", "/tmp/gone.py:Agent", ["--agent", "tool-calling"]),
        ("command", "touch gone", ["--command", "true"]),
        ("trust_remote_code", True, ["--trust-remote-code"]),
    ],
)
@pytest.mark.parametrize("part", ["environments", "provenance"])
def test_code_in_a_record_must_be_trusted(recorded: Path, here: Path, case: Any, part: str) -> None:
    name, value, given = case
    changed = settings(recorded)
    entry = changed["provenance"]["desk"][0]["options"]
    if part == "environments" and name != "env":
        entry = changed["environments"]["desk"]
    entry[name] = value
    (here / "run.json").write_text(json.dumps(changed))
    again = ["run", "--from", here, "--model", here / "gone"]
    with pytest.raises(UsageError, match=rf"names code that would be run \({name}: "):
        toolroll(*again)
    for more in (["--trust"], given):
        with pytest.raises(UsageError) as later:
            toolroll(*again, *more)
        assert "names code" not in str(later.value)
