"""A disk that is full or fails: one line, exit status 2, and a folder in which the run goes on."""

import errno
import io
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from support.commands import run_command, run_main, toolroll
from support.faults.tally import Tally
from support.results import content, episode
from support.scripted_runs import Scripted, ScriptedFactory, Talker

from toolroll import Runner, RunSettings, UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME, EpisodeStore, read_episodes, to_line
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.runtime.threads import Threads
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, serve_in_thread


class Failing(io.BufferedIOBase):
    """A file whose write or flush number `at` fails, after half of its bytes."""

    def __init__(self, path: Path, at: int) -> None:
        self.file, self.left = path.open("ab", buffering=0), at

    def write(self, data: Any) -> int:
        if self._fails():
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def flush(self) -> None:
        if self._fails():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _fails(self) -> bool:
        self.left -= 1
        return self.left < 0

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


def failing_store(folder: Path, at: int) -> EpisodeStore:
    return EpisodeStore(folder, file=cast(BinaryIO, Failing(folder / FILE_NAME, at)))


@pytest.mark.faults
@pytest.mark.parametrize("at", range(12))
async def test_a_run_goes_on_after_any_failed_write(tmp_path: Path, at: int, tally: Tally) -> None:
    factory = ScriptedFactory(lambda: Scripted(lambda name, task: None), count=6)

    async def play(store: EpisodeStore, done: frozenset[Any] = frozenset()) -> None:
        threads = Threads(2)
        settings = RunSettings(concurrency=2, pace_gc=False)
        runner = Runner(factory, lambda: Talker(threads), settings)
        await runner.run(factory.tasks("test"), store.append, done=done)

    words = r"episodes\.jsonl cannot be written.*run the same command again"
    with pytest.raises(UsageError, match=words), failing_store(tmp_path, at) as store:
        await play(store)
    kept = {(found.task_id, found.sample) for found in read_episodes(tmp_path)}
    assert len(kept) == (at + 1) // 2
    with EpisodeStore(tmp_path) as store:
        await play(store, frozenset(kept))
    tally.tried()
    tally.played(list(read_episodes(tmp_path)), [(f"t-{index}", 0) for index in range(6)], {})
    tally.check()


def test_a_torn_line_or_a_failed_close_is_not_silent(tmp_path: Path) -> None:
    store = failing_store(tmp_path, 2)
    store.append(episode(sample=0))
    for sample in (1, 2):
        with pytest.raises(UsageError, match=r"cannot be written|an earlier write failed"):
            store.append(episode(sample=sample))
    store.close()
    torn = (tmp_path / FILE_NAME).read_bytes()
    assert torn.startswith(to_line(episode(sample=0)))
    assert torn.count(b"\n") == 1
    assert not torn.endswith(b"\n")
    (tmp_path / "other").mkdir()
    store = failing_store(tmp_path / "other", 2)
    store.append(episode())
    with pytest.raises(UsageError, match="Input/output error"):
        store.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The files that were forced to disk."""
    files, fsync = list[int](), os.fsync

    def counted(descriptor: int) -> None:
        files.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    return files


@pytest.mark.parametrize(("sync", "count"), [("end", 1), ("always", 4)])
def test_sync_decides_how_often_to_fsync(here: Path, sync: Any, count: int, synced: Any) -> None:
    with EpisodeStore(here / "store", sync=sync) as store:
        for sample in range(3):
            store.append(episode(sample=sample))
    assert len(synced) == count + 1, "the folder too"
    out, options = here / "run", ["--sync", "always"] if sync == "always" else []
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer())) as engine:
        fixed = ("--tasks", "0-2", "--no-do-nothing", "--out", out)
        assert toolroll(*run_command(engine.url, *fixed, *options)).exit_code == 0
    assert len(list(read_episodes(out))) == 3
    assert synced.count((out / FILE_NAME).stat().st_ino) == count


def test_a_doubled_line_counts_once(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, "pond", {}) as folder:
        for sample in range(3):
            folder.append(episode(sample=sample))
    file = tmp_path / FILE_NAME
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines, lines[1], lines[0]]))
    assert [found.sample for found in read_episodes(tmp_path)] == [0, 1, 2]
    again = episode(sample=1, reward=0.0)  # another line of the same episode
    file.write_bytes(file.read_bytes() + to_line(again))
    with RunDirectory(tmp_path, "pond", {}) as folder:
        assert (folder.summary.episodes, folder.summary.reward) == (3, 3.0)
        assert len(folder.done) == 3


@pytest.mark.parametrize("reading", [False, True])
def test_what_was_there_stays_if_the_new_file_fails(tmp_path: Path, reading: bool) -> None:
    """What cannot be read is not said to be what cannot be written."""
    file = tmp_path / "page.html"
    file.write_text("old")
    kind, words = UsageError, r"page\.html cannot be written: File too large$"
    with (
        room(1000),
        pytest.raises(IsADirectoryError if reading else kind, match="" if reading else words),
        written_whole(file) as out,
    ):
        out.write(tmp_path.read_bytes() if reading else b"x" * 100_000)
    assert file.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"]


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing fails as it does on a full
    disk. Bytecode is not written either: Python would keep modules that are cut off.
    """
    before, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fails(monkeypatch: Any, capfd: Any, *arguments: object, size: int = 5_000) -> str:
    """Return the message of a command for which the disk is too small."""
    with room(size):
        assert run_main(monkeypatch, *arguments) == 2
    message = capfd.readouterr().err
    assert re.fullmatch(r"toolroll: .*cannot be written: .*File too large.*\n", message)
    return message


def test_the_command_line_says_it_in_one_line(here: Path, monkeypatch: Any, capfd: Any) -> None:
    engine = EmbeddedEngine(load_embedded_tokenizer(), lambda request: "Goodbye.")
    with serve_in_thread(engine):
        out = here / "run"
        command = run_command(engine.url, "--tasks", "0-9", "--no-do-nothing", "--out", out)
        assert "run the same command again" in fails(monkeypatch, capfd, *command, size=150_000)
        kept = [content(found) for found in read_episodes(out)]
        assert 0 < len(kept) < 10
        assert run_main(monkeypatch, *command) == 0
    found = list(read_episodes(out))
    assert [content(one) for one in found[: len(kept)]] == kept
    assert len({one.task_id for one in found}) == len(found) == 10
    before = sorted(found.name for found in out.iterdir())
    fails(monkeypatch, capfd, "view", out)
    fails(monkeypatch, capfd, "export", out, "--format", "atif", "--out", here / "trajectories")
    assert sorted(found.name for found in out.iterdir()) == before
    assert [found.name for found in here.iterdir()] == ["run"]


def test_a_data_set_is_written_whole_or_not(here: Path, monkeypatch: Any, capfd: Any) -> None:
    pytest.importorskip("pyarrow")
    with EpisodeStore(here / "run") as store:
        for sample in range(3):
            store.append(episode(sample=sample))
    fails(monkeypatch, capfd, "export", here / "run", "--out", here / "data", size=500)
    assert [found.name for found in here.iterdir()] == ["run"]


def replace_it(file: Path) -> None:
    written = file.read_bytes()
    file.unlink()
    file.write_bytes(written)


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": replace_it,
    "removed": Path.unlink,
    "emptied": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("then", ["append", "close"])
def test_a_file_that_another_program_changed(here: Path, change: Any, then: str) -> None:
    store = EpisodeStore(here)
    store.append(episode(sample=0))
    change(here / FILE_NAME)
    message = r"episodes.jsonl was replaced, changed or removed while it was written"
    with pytest.raises(UsageError, match=message):
        getattr(store, then)(*[episode(sample=1)] * (then == "append"))
    if then == "append":
        store.close()  # which has nothing to add
