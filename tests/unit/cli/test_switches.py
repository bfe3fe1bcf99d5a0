"""`toolroll run --sync` and `--no-pace-gc`: what they say is what happens during the run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command, toolroll
from typer.testing import Result

from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes
from toolroll.rollout.runtime.garbage import THRESHOLD
from toolroll.testing import EmbeddedEngine, PolicyRequest, serve_in_thread

TASKS = 3


@pytest.fixture
def paced() -> list[bool]:
    """Whether the collector was paced, at each request."""
    return []


@pytest.fixture
def engine(paced: list[bool], tokenizer: Any) -> Iterator[EmbeddedEngine]:
    def policy(request: PolicyRequest) -> str:
        paced.append(gc.get_threshold() == THRESHOLD and gc.get_freeze_count() > 0)
        return "Goodbye."

    with serve_in_thread(EmbeddedEngine(tokenizer, policy)) as served:
        yield served


def run(engine: EmbeddedEngine, *arguments: object) -> Result:
    fixed = ("--tasks", f"0-{TASKS - 1}", "--no-do-nothing")
    return toolroll(*run_command(engine.url, *fixed, *arguments))


def test_sync_decides_how_often_the_file_is_forced_to_disk(
    engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[int](), os.fsync

    def counted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    counts = {}
    for name, options in {"default": [], "always": ["--sync", "always"]}.items():
        synced.clear()
        assert run(engine, "--out", tmp_path / name, *options).exit_code == 0
        assert len(list(read_episodes(tmp_path / name))) == TASKS
        counts[name] = synced.count((tmp_path / name / FILE_NAME).stat().st_ino)
    assert counts == {"default": 1, "always": TASKS + 1}


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize(
    ("options", "is_paced"), [([], True), (["--pace-gc"], True), (["--no-pace-gc"], False)]
)
def test_no_pace_gc_leaves_the_garbage_collector_as_it_is(
    engine: EmbeddedEngine, paced: list[bool], options: list[str], is_paced: bool
) -> None:
    before = gc.get_threshold()
    assert run(engine, *options).exit_code == 0
    assert len(paced) >= TASKS
    assert set(paced) == {is_paced}
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
