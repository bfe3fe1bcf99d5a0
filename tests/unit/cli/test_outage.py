"""`toolroll run` and servers that are not there: from the start, or from the middle of a run on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.client import StartingEngine

from toolroll import Status, read_episodes
from toolroll.evaluation.run_config import FREE
from toolroll.testing import EmbeddedEngine, PolicyRequest, serve_in_thread

RUN = ["run", "desk", "--model", "embedded", "--no-do-nothing"]
DEAD = "http://127.0.0.1:9/v1"
SECRET = "http://me:secret@127.0.0.1:9"
LATE = "has not answered for 0.01 s: nothing answers (Connection refused)"
USERS = ["--user-url", DEAD, "--user-model", "m"]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What toolroll logged. asyncio may log what an earlier test left."""
    own = (record for record in caplog.records if record.name.startswith("toolroll"))
    return [record.getMessage() for record in own if record.levelname != "INFO"]


@pytest.mark.parametrize(
    ("timeout", "arguments", "words"),
    [
        ("0", ["--baseline-url", SECRET + "/v1"],
         f"--baseline-url: the server at {DEAD}: nothing answers (Connection refused)"),
        ("0", ["--engine", SECRET], "the engine at http://127.0.0.1:9: nothing answers ("),
        ("0.01", ["--engine", "http://127.0.0.1:9"], f"the engine at http://127.0.0.1:9 {LATE}"),
        ("0.01", USERS, f"--user-url: the server at {DEAD} {LATE}"),
    ],
)  # fmt: skip
def test_a_server_that_is_not_there_ends_the_run_at_once(
    timeout: str, arguments: list[str], words: str, tmp_path: Path, command: Any
) -> None:
    run = [*RUN, *arguments, "--engine-timeout", timeout, "--out", tmp_path / "run"]
    status, _, errors = command(*run)
    assert (status, errors.count("\n")) == (2, 1)
    assert words in errors and "secret" not in errors
    assert errors.count("127.0.0.1") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_waits_for_an_engine(tokenizer: Any, here: Path, command: Any, caplog: Any) -> None:
    """Then it makes its folder, if it can."""
    run = [*RUN, "--tasks", "0", "--engine-timeout", "0.05", "--out", "run"]
    engine = StartingEngine(tokenizer, lambda seen: "Goodbye.")
    with serve_in_thread(engine):
        assert command(*run, "--engine", engine.url)[0] == 0
        assert engine.checks == 3  # down, up, and once more before the run
        first, last = warnings_of(caplog)
        assert f"the engine at {engine.url} does not answer (/health answers 503" in first
        assert first.endswith("waiting for it, up to 0.05 s")
        assert last == f"the engine at {engine.url} answers again"
        (here / "afile").write_text("")
        for out, words in (
            ("afile", "--out afile is a file"),
            ("afile/x", "--out afile/x: cannot create the folder"),
        ):
            status, _, errors = command(*RUN, "--engine", engine.url, "--out", out)
            assert (status, errors.count("\n")) == (2, 1) and words in errors


def test_an_engine_dies_for_good(tokenizer: Any, here: Path, command: Any, caplog: Any) -> None:
    killing: list[asyncio.Task[None]] = []

    def dies(seen: PolicyRequest) -> str:
        if seen.index == 10:
            killing.append(asyncio.get_running_loop().create_task(mortal.kill()))
        return "Goodbye."

    run = [*RUN, "--concurrency", "4", "--engine-timeout", "0.01", "--out", str(here)]
    with serve_in_thread(EmbeddedEngine(tokenizer, dies)) as mortal:
        status, _, last = command(*run, "--engine", mortal.url)
    assert (status, last.count("\n")) == (2, 1)
    [waiting] = warnings_of(caplog)
    assert f"the engine at {mortal.url} does not answer (" in waiting
    assert f"the engine at {mortal.url} has not answered for 0.01 s" in last
    assert waiting.count("127.0.0.1") == last.count("127.0.0.1") == 1
    assert last.endswith("the same command continues from there.\n")
    kept = list(read_episodes(here))
    assert kept and {episode.result.status for episode in kept} == {Status.COMPLETED}

    with serve_in_thread(EmbeddedEngine(tokenizer, lambda seen: "Goodbye.")) as engine:
        assert command(*run, "--engine", engine.url)[0] == 0
    episodes = list(read_episodes(here))
    assert len(episodes) > len(kept)
    assert len({episode.task_id for episode in episodes}) == len(episodes)
    assert {episode.result.status for episode in episodes} == {Status.COMPLETED}
    assert "engine_timeout" in FREE, "a run may go on with another one"
