"""The journal: what is written is on the disk when its future is done, in order, in few writes."""

import asyncio
import errno
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.patience import held

from toolroll.endpoint.disk import journal as journal_module
from toolroll.endpoint.disk.journal import Journal, read_lines
from toolroll.endpoint.errors import ApiError
from toolroll.rollout.runtime import disk


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    opened = Journal(tmp_path / "j")
    yield opened
    await opened.aclose()


def lines(journal: Journal) -> list[bytes]:
    return [line for _, line in read_lines(journal.path)]


async def test_lines_that_arrive_together_share_a_write(journal: Journal) -> None:
    written = [f"{number}\n".encode() for number in range(100)]
    for part in (written[:60], written[60:]):
        for saved in [journal.append(line) for line in part]:
            await saved
    assert lines(journal) == written
    assert journal.writes == 2
    await journal.aclose()
    with pytest.raises(ApiError, match="the server is stopping"):
        journal.append(b"late\n")


async def test_a_done_line_is_synced(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fdatasync = list[int](), os.fdatasync

    def counted(descriptor: int) -> None:
        fdatasync(descriptor)
        synced.append(journal.path.stat().st_size)

    monkeypatch.setattr(os, "fdatasync", counted)
    await journal.append(b"one\n")
    await journal.append(b"two\n", b"three\n")
    assert synced == [4, 14]
    await journal.append()  # nothing is left to write, and nothing to wait for
    assert synced == [4, 14]


async def test_a_full_disk_leaves_whole_lines(journal: Journal) -> None:
    await journal.append(b"one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        for saved in [journal.append(b"a longer line\n"), journal.append(b"another\n")]:
            with pytest.raises(ApiError, match="cannot be written: File too large") as refused:
                await saved
            assert (refused.value.status, refused.value.code) == (503, "storage_failed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(ApiError, match="File too large"):
        journal.append(b"x\n")
    assert lines(journal) == [b"one\n"]


async def test_giving_up_stops_no_other(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, reached, go_on = held(os.fdatasync)
    monkeypatch.setattr(os, "fdatasync", slow)
    given_up, other = journal.append(b"one\n"), journal.append(b"two\n")
    await asyncio.to_thread(reached.wait)
    given_up.cancel()
    later = journal.append(b"three\n")
    go_on.set()
    await asyncio.gather(other, later)
    assert lines(journal) == [b"one\n", b"two\n", b"three\n"]


async def test_compacting_keeps_what_arrives_meanwhile(journal: Journal) -> None:
    first = journal.append(b"a1\n", b"b1\n", b"a2\n")
    journal.compact(lambda: lambda line: line.startswith(b"a"))
    await first
    later = journal.append(b"b2\n")
    await asyncio.gather(later, journal.flush())
    assert lines(journal) == [b"a1\n", b"a2\n", b"b2\n"]


async def test_a_folder_cannot_be_synced(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next lines go to the new file."""
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
    assert lines(journal) == [b"a1\n", b"a2\n"]
    failures = 2  # the journal cannot sync the folder either
    journal.compact(lambda: lambda line: True)
    await journal.flush()
    with pytest.raises(ApiError, match="cannot be written: Input/output error"):
        journal.append(b"a3\n")
    assert lines(journal) == [b"a1\n", b"a2\n"]


async def test_an_unexpected_failure_ends_the_whole_journal(journal: Journal) -> None:

    def broken(line: bytes) -> bool:
        raise RuntimeError("broken")

    await journal.append(b"a1\n")
    journal.compact(lambda: broken)
    later = journal.append(b"a2\n")
    with pytest.raises(ApiError, match="cannot be written: RuntimeError"):
        await asyncio.gather(later, journal.append())
        await journal.append(b"a3\n")
    assert lines(journal) == [b"a1\n", b"a2\n"]
