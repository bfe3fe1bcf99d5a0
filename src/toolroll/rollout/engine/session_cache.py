"""`SessionCache`: marks the tokens of open sessions in SGLang's prefix cache, so that they are
evicted last (`--enable-session-radix-cache`).

Invariants:

- Only requests of open sessions are marked. A request that comes after the end opens nothing again.
- Each opening has a new id, because SGLang ignores ids that were closed.
- An id is closed after its owner and its last request have ended, and at every worker. If that
  fails, it is closed again after the next one that could be closed, or in `settle`.
- An id is in a file before it is sent, and until it is closed. The process locks its file. So if it
  is killed, the next process that uses the same folder can close the id, and no live process's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.disk import lock, written_whole

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
    """The open sessions of one client of the engine at `url`. `close` closes one id at every
    worker, and returns False if a later call may succeed where this one failed.

    The ids are in a folder below the user's `~/.cache` that all clients of this machine and `url`
    share, unless `keep` names another one. The first session closes what killed processes left in
    the shared folder.
    """

    def __init__(self, close: Callable[[str], Awaitable[bool]], url: str) -> None:
        self._close = close
        self._shared = _shared_folder(url)
        self._file = _IdFile(self._shared)
        self._open: dict[str, CachedSession] = {}
        self._closing: set[asyncio.Task[Any]] = set()
        self._failed: list[str] = []

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
                self._file.add(session.id)
                if self._shared is not None:
                    self._run(self.close_left(self._shared))
                    self._shared = None
        return session

    def leave(self, session: CachedSession) -> None:
        """Count one user less. The last one closes the session, in a task."""
        session.users -= 1
        if not session.users and session.id:
            self._run(self._closed(session.id))

    def _run(self, closing: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _closed(self, session_id: str) -> None:
        unclosed = await self._close_all([session_id])
        while self._failed and not unclosed:
            failed, self._failed = self._failed, []
            unclosed = await self._close_all(failed)
        self._failed += unclosed

    async def _close_one(self, session_id: str) -> bool:
        closed = await self._close(session_id)
        if closed:
            self._file.remove(session_id)
        return closed

    async def _close_all(self, ids: Sequence[str]) -> list[str]:
        """Close `ids`, `_AT_ONCE` at once, until one cannot be closed: the others would wait for
        the same worker. Return the ids that are left, first the ones that were not tried.
        """
        for start in range(0, len(ids), _AT_ONCE):
            tried = ids[start : start + _AT_ONCE]
            closed = await asyncio.gather(*map(self._close_one, tried))
            unclosed = [name for name, done in zip(tried, closed, strict=True) if not done]
            if unclosed:
                return [*ids[start + _AT_ONCE :], *unclosed]
        return []

    async def settle(self) -> None:
        """Wait until the sessions that have ended are closed. Try once more where that failed."""
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        failed, self._failed = self._failed, []  # what fails again stays in the file
        await self._close_all(failed)

    def keep(self, folder: Path) -> None:
        """Keep the ids of open sessions in a file in `folder`, if this machine has the folder."""
        if folder.is_dir() and not self._file.lines:
            self._file = _IdFile(folder)

    async def close_left(self, folder: Path) -> int:
        """Close the sessions that killed processes left open, by the files in `folder`. Return
        their number. The ids that could not be closed stay in the files.
        """
        closed = 0
        for file in _files(folder):
            try:
                with file.open("rb") as opened:
                    if not file.stat().st_size:  # not locked yet
                        continue
                    lock(opened.fileno())
                    ids = [match.decode() for match in _ID.findall(opened.read())]
                    left = await self._close_all(ids)
                    closed += len(ids) - len(left)
                    if left:
                        with written_whole(file) as rewritten:
                            rewritten.writelines(f"{session_id}\n".encode() for session_id in left)
                    else:
                        file.unlink(missing_ok=True)
            except (BlockingIOError, FileNotFoundError):
                continue  # its process is alive, or another one has closed its sessions
            except (OSError, UsageError) as error:  # a run must not fail for it
                logger.warning("the sessions in %s may stay open: %s", file, error)
        return closed


def _shared_folder(url: str) -> Path | None:
    """Return the folder for the engine at `url`, or None if the user has no home."""
    name = hashlib.sha256(f"{socket.gethostname()} {url}".encode()).hexdigest()[:16]
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "toolroll", name)


def _files(folder: Path) -> list[Path]:
    return list(folder.glob(f"{_PREFIX}*"))


class _IdFile:
    """A locked file with one id a line, while there is an id. Lines are used again, so it stays
    short. It is in `folder`, which is made if needed. Without a folder, or if it cannot be written,
    there is no file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._opened: tuple[Path, int] | None = None
        self.lines: dict[str, int] = {}
        self._free: list[int] = []

    def add(self, session_id: str) -> None:
        """Write an id."""
        line = self._free.pop() if self._free else len(self.lines)
        self.lines[session_id] = line
        self._write(session_id, line)

    def remove(self, session_id: str) -> None:
        """Remove an id."""
        if (line := self.lines.pop(session_id, None)) is None:
            return
        self._free.append(line)
        self._write(" " * (_LINE - 1), line)
        if not self.lines and self._opened is not None:
            path, descriptor = self._opened
            path.unlink(missing_ok=True)
            os.close(descriptor)
            self._opened = None
            self._free.clear()

    def _write(self, text: str, line: int) -> None:
        if self._folder is None:
            return
        try:
            if self._opened is None:
                self._opened = self._new(self._folder)
            os.pwrite(self._opened[1], f"{text}\n".encode("ascii"), line * _LINE)
        except OSError as error:  # a run must not fail for it
            logger.warning("the file of open sessions in %s failed: %s", self._folder, error)
            self._folder = None

    def _new(self, folder: Path) -> tuple[Path, int]:
        # Never a name that was used before: another process may be about to delete that file.
        path = folder / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        lock(descriptor)
        return path, descriptor
