"""The journal: what is written is on the disk when its future is done, in order, in few writes."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
from pathlib import Path

import pytest

from toolroll.endpoint.disk import journal as journal_module
from toolroll.endpoint.disk.journal import Journal, read_lines
from toolroll.endpoint.errors import ApiError
from toolroll.rollout.runtime import disk


def lines(path: Path) -> list[bytes]:
    return [line for _, line in read_lines(path)]


async def test_lines_that_arrive_together_share_a_write_and_keep_their_order(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "j")
    wanted = [f"{number}\n".encode() for number in range(100)]
    for part in (wanted[:60], wanted[60:]):
        for saved in [journal.append(line) for line in part]:
            await saved
    assert lines(journal.path) == wanted
    assert journal.writes == 2
    await journal.aclose()
    with pytest.raises(ApiError, match="the server is stopping"):
        journal.append(b"late\n")


async def test_a_line_is_in_the_file_and_synced_before_its_future_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, synced, fdatasync = Journal(tmp_path / "j"), list[int](), os.fdatasync

    def counted(descriptor: int) -> None:
        fdatasync(descriptor)
        synced.append(journal.path.stat().st_size)

    monkeypatch.setattr(os, "fdatasync", counted)
    await journal.append(b"one\n")
    await journal.append(b"two\n", b"three\n")
    assert synced == [4, 14]
    await journal.append()  # nothing is left to write, and nothing to wait for
    assert synced == [4, 14]
    await journal.aclose()


async def test_a_full_disk_fails_what_was_not_written_and_leaves_whole_lines(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "j")
    await journal.append(b"one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        failed = [journal.append(b"a longer line\n"), journal.append(b"another\n")]
        for saved in failed:
            with pytest.raises(ApiError, match="cannot be written: File too large") as refused:
                await saved
            assert (refused.value.status, refused.value.code) == (503, "storage_failed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(ApiError, match="File too large"):
        journal.append(b"x\n")
    assert journal.path.read_bytes() == b"one\n"
    await journal.aclose()


async def test_compacting_keeps_what_is_asked_for_and_what_arrives_meanwhile(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "j")
    first = journal.append(b"a1\n", b"b1\n", b"a2\n")
    journal.compact(lambda: lambda line: line.startswith(b"a"))
    await first
    later = journal.append(b"b2\n")
    await asyncio.gather(later, journal.flush())
    assert lines(journal.path) == [b"a1\n", b"a2\n", b"b2\n"]
    await journal.aclose()


async def test_a_caller_that_gives_up_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, fdatasync = Journal(tmp_path / "j"), os.fdatasync
    held, reached = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        reached.set()
        held.wait()
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    given_up, other = journal.append(b"one\n"), journal.append(b"two\n")
    await asyncio.to_thread(reached.wait)
    given_up.cancel()
    later = journal.append(b"three\n")
    held.set()
    await asyncio.gather(other, later)
    assert lines(journal.path) == [b"one\n", b"two\n", b"three\n"]
    await journal.aclose()


async def test_after_a_compaction_whose_folder_cannot_be_synced_lines_go_to_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j")
    await journal.append(b"a1\n", b"b1\n")
    failures = 1

    def broken(folder: Path) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "sync_folder", broken)
    monkeypatch.setattr(journal_module, "sync_folder", broken)
    journal.compact(lambda: lambda line: line.startswith(b"a"))
    await journal.flush()
    await journal.append(b"a2\n")
    assert lines(journal.path) == [b"a1\n", b"a2\n"]
    failures = 2  # the journal cannot sync the folder either
    journal.compact(lambda: lambda line: True)
    await journal.flush()
    with pytest.raises(ApiError, match="cannot be written: Input/output error"):
        journal.append(b"a3\n")
    assert lines(journal.path) == [b"a1\n", b"a2\n"]
    await journal.aclose()


async def test_a_failure_that_nobody_expected_ends_the_journal_and_not_only_its_writer(
    tmp_path: Path,
) -> None:
    def broken(line: bytes) -> bool:
        raise RuntimeError("broken")

    journal = Journal(tmp_path / "j")
    await journal.append(b"a1\n")
    journal.compact(lambda: broken)
    later = journal.append(b"a2\n")
    with pytest.raises(ApiError, match="cannot be written: RuntimeError"):
        await asyncio.gather(later, journal.append())
        await journal.append(b"a3\n")
    assert lines(journal.path) == [b"a1\n", b"a2\n"]
    await journal.aclose()
