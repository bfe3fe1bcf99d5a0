"""`SessionCache`: marks the tokens of open sessions in SGLang's prefix cache, so that they are
evicted last (`--enable-session-radix-cache`).

Invariants:

- Only requests of open sessions are marked. A request that comes after the end opens nothing again.
- Each opening has a new id, because SGLang ignores ids that were closed.
- An id is closed after its owner and its last request have ended, and at every worker. If that
  fails, it is closed again after the next one that could be closed, or in `settle`.
- An id is in the file before it is sent, and until it is closed. So if the process is killed, the
  next start with the same folder can close it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.disk import written_whole

logger = logging.getLogger(__name__)

_PREFIX = ".open-sessions-"
_ID = re.compile(rb"[0-9a-f]{32}(?=\n)")
_LINE = 33
"""The bytes of one line in a file: an id, or spaces, and the line's end."""
_AT_ONCE = 32  # sessions to close, of a killed process or after a failure


@dataclass(slots=True, eq=False)
class CachedSession:
    """One opening of a session. `id` is empty until the first request. `users`: its owner, and its
    requests in flight.
    """

    name: str
    id: str = ""
    users: int = 1
    ended: bool = False


class SessionCache:
    """The open sessions of one engine client. `close` closes one id at every worker, and returns
    False if a later call may succeed where this one failed.
    """

    def __init__(self, close: Callable[[str], Awaitable[bool]]) -> None:
        self._close = close
        self._open: dict[str, CachedSession] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._failed: list[str] = []
        self._file: _IdFile | None = None

    def open(self, name: str) -> Callable[[], None]:
        """Open the session `name`. Return the function that ends it."""
        session = self._open[name] = CachedSession(name)
        return partial(self._end, session)

    def _end(self, session: CachedSession) -> None:
        if self._open.get(session.name) is session:
            del self._open[session.name]
        if not session.ended:
            session.ended = True
            self.leave(session)

    def enter(self, name: str) -> CachedSession | None:
        """Return the open session of a request that is about to be sent, or None. Call `leave` when
        the request has ended.
        """
        session = self._open.get(name)
        if session is not None:
            session.users += 1
            if not session.id:
                session.id = os.urandom(16).hex()
                if self._file is not None:
                    self._file.add(session.id)
        return session

    def leave(self, session: CachedSession) -> None:
        """Count one user less. The last one closes the session, in a task."""
        session.users -= 1
        if not session.users and session.id:
            task = asyncio.get_running_loop().create_task(self._closed(session.id))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _closed(self, session_id: str) -> None:
        left = await self._close_all([session_id])
        while self._failed and not left:
            failed, self._failed = self._failed, []
            left = await self._close_all(failed)
        self._failed += left

    async def _close_one(self, session_id: str) -> bool:
        closed = await self._close(session_id)
        if closed and self._file is not None:
            self._file.remove(session_id)
        return closed

    async def _close_all(self, ids: Sequence[str]) -> list[str]:
        """Close `ids`, `_AT_ONCE` at once, until one cannot be closed: the others would wait for
        the same worker. Return the ids that are left, first the ones that were not tried.
        """
        for start in range(0, len(ids), _AT_ONCE):
            tried = ids[start : start + _AT_ONCE]
            closed = await asyncio.gather(*map(self._close_one, tried))
            left = [each for each, done in zip(tried, closed, strict=True) if not done]
            if left:
                return [*ids[start + _AT_ONCE :], *left]
        return []

    async def settle(self) -> None:
        """Wait until the sessions that have ended are closed. Try once more where that failed."""
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        failed, self._failed = self._failed, []  # what fails again stays in the file
        await self._close_all(failed)

    def keep(self, folder: Path) -> None:
        """Keep the ids of open sessions in a file in `folder`, if this machine has the folder."""
        if self._file is None and folder.is_dir():
            self._file = _IdFile(folder / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}")

    async def close_left(self, folder: Path) -> int:
        """Close the sessions that killed processes left open, by the files in `folder`. Return
        their number. The ids that could not be closed stay in the files. No other live process may
        use the folder.
        """
        closed = 0
        for file in self._left(folder):
            try:
                ids = [found.decode() for found in _ID.findall(file.read_bytes())]
                left = await self._close_all(ids)
                closed += len(ids) - len(left)
                if left:
                    with written_whole(file) as rewritten:
                        rewritten.writelines(f"{session_id}\n".encode() for session_id in left)
                else:
                    file.unlink(missing_ok=True)
            except (OSError, UsageError) as error:  # a run must not fail for it
                logger.warning("the sessions in %s may stay open: %s", file, error)
        return closed

    def _left(self, folder: Path) -> list[Path]:
        own = None if self._file is None else self._file.path
        return [file for file in folder.glob(f"{_PREFIX}*") if file != own]


class _IdFile:
    """A file with one id a line, while there is an id. Lines are used again, so it stays short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._lines: dict[str, int] = {}
        self._free: list[int] = []

    def add(self, session_id: str) -> None:
        """Write an id."""
        line = self._free.pop() if self._free else len(self._lines)
        self._lines[session_id] = line
        self._write(session_id, line)

    def remove(self, session_id: str) -> None:
        """Remove an id."""
        if (line := self._lines.pop(session_id, None)) is None:
            return
        self._free.append(line)
        self._write(" " * (_LINE - 1), line)
        if not self._lines and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._free.clear()
            self.path.unlink(missing_ok=True)

    def _write(self, text: str, line: int) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o644)
            os.pwrite(self._descriptor, f"{text}\n".encode("ascii"), line * _LINE)
        except OSError as error:  # a run must not fail for it
            logger.warning("%s cannot be written: %s", self.path, error)
