"""`Journal`: an append-only file of JSON lines, for data that must survive a kill of the process.

Invariants: the future that `append` returns is done once its lines are on disk (fdatasync). Lines
that arrive during a write share the next write (group commit), in the order of the `append` calls.
After a failure nothing more is written, and the file ends with the last line that was saved.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from toolroll.endpoint.errors import ApiError, server_stopping
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.disk import sync_folder, writing, written_whole
from toolroll.rollout.runtime.foreign import retrieve

logger = logging.getLogger(__name__)

Keep = Callable[[bytes], bool]

SAVED = "All answers so far are kept; free some space, and start the server again"


class Journal:
    """The file `path`, which is created if it does not exist. Use it on one event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stopping = False
        """True once the server stops. Sessions that end later end for this reason: no client has
        deleted them.
        """
        self.writes = 0
        """The number of synced writes: at most one for each `append`."""
        self._closed = False
        self._failure: str | None = None
        self._waiting: list[bytes] = []
        self._saved: list[asyncio.Future[None]] = []
        self._writer: asyncio.Task[None] | None = None
        self._keep: Callable[[], Keep] | None = None
        # its own thread, so that an answer does not wait for other work in threads
        self._thread = ThreadPoolExecutor(1, "toolroll-journal")
        self._open()

    def _open(self) -> None:
        with writing(self.path):
            self._file = self.path.open("ab", buffering=0)
            self._size = self._file.tell()
            sync_folder(self.path.parent)

    def check(self) -> None:
        """Raise `ApiError` (503) if the file can no longer be written."""
        if self._closed:
            raise server_stopping()
        if self._failure is not None:
            raise ApiError(503, "storage_failed", self._failure)

    def append(self, *lines: bytes) -> asyncio.Future[None]:
        """Append `lines`, each of which ends with a newline. The returned future is done once the
        lines are on disk. If they cannot be written, the future raises `ApiError` (503). Every
        later call of this method then raises the same error.

        Each caller gets its own future. Cancelling it affects no other caller, and the lines are
        still written.
        """
        self.check()
        self._waiting += lines
        saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        saved.add_done_callback(retrieve)  # the caller may not wait
        self._saved.append(saved)
        self._start()
        return saved

    def compact(self, keep: Callable[[], Keep]) -> None:
        """Rewrite the file without some of its lines, once the waiting lines are written. `keep` is
        called at that time. It must return a function that returns True for each line to keep.
        """
        self._keep = keep
        self._start()

    async def flush(self) -> None:
        """Wait until all appended lines are written."""
        while self._writer is not None and not self._writer.done():
            await asyncio.wait([self._writer])

    async def aclose(self) -> None:
        """Write the remaining lines and close the file."""
        await self.flush()
        self._closed = True
        self._thread.shutdown()
        self._file.close()

    def _start(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        call = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        while self._saved or self._keep is not None:
            lines, saved = self._waiting, self._saved
            keep, self._keep = self._keep, None
            self._waiting, self._saved = [], []
            try:
                if lines:
                    await call(self._write, b"".join(lines))
                for future in saved:
                    if not future.done():  # its caller may have cancelled it
                        future.set_result(None)
                if keep is not None:
                    await call(self._rewrite, keep())
            except UsageError as error:
                self._fail(str(error), saved)
                return
            except Exception as error:  # the writer's border: no caller may wait forever
                logger.exception("%s can no longer be written", self.path)
                self._fail(f"{self.path} cannot be written: {error!r}", saved)
                return

    def _fail(self, failure: str, saved: list[asyncio.Future[None]]) -> None:
        failed, self._saved = [*saved, *self._saved], []
        self._failure, self._waiting, self._keep = failure, [], None
        for future in failed:
            if not future.done():
                future.set_exception(ApiError(503, "storage_failed", failure))

    def _write(self, data: bytes) -> None:
        with writing(self.path, SAVED):
            try:
                remaining = memoryview(data)
                while remaining:
                    remaining = remaining[self._file.write(remaining) :]
                os.fdatasync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), self._size)
                raise
        self._size += len(data)
        self.writes += 1

    def _rewrite(self, keep: Keep) -> None:
        try:
            with written_whole(self.path, "The old file is kept") as out:
                for _, line in read_lines(self.path):
                    if keep(line):
                        out.write(line)
        except UsageError as error:
            logger.warning("%s", error)
            if self._is_open():
                return
        self._file.close()
        self._open()

    def _is_open(self) -> bool:
        """Return True if `path` still names the open file. If the new file was written, and only
        the sync of the folder failed, `path` names the new file.
        """
        with writing(self.path):
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of every complete line, not of an incomplete last one."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                yield number, line
