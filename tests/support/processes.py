"""Server processes of tests: started in a separate session, watched until they answer, killed as a
group.

Invariants: nothing outlives the test run (the group is killed by its id; the kernel kills the
server if pytest itself is killed); if a server does not start, the error has the end of its log;
servers listen only on 127.0.0.1.
"""

import asyncio
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.patience import PATIENCE

HOST = "127.0.0.1"
START_DEADLINE = 240.0
"""Seconds until a server must answer: 15-35 on two idle cores, several times that on busy ones."""
_GRACE = 2.0  # an idle router ends after 1.5 s; SGLang takes 4 s to drain, and has nothing to save
_POLL = 0.2
_PORT_TAKEN = re.compile(
    r"address already in use|port \d+ is (not available|already in use|occupied)", re.IGNORECASE
)
_PR_SET_PDEATHSIG = 1


TOOLROLL = (sys.executable, "-m", "toolroll")
PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with `words` to its end, and keep what it prints."""
    command = [sys.executable, *map(str, words)]
    defaults = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": False}
    return subprocess.run(command, **{**defaults, **options})


def printed(*words: object, **options: Any) -> str:
    """What `python` prints. It must not fail."""
    done = python(*words, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def wait_until(done: Callable[[], object], *, pause: float = 0.02) -> None:
    """Wait until `done()` is true. Raise an error after a time limit."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(pause)


@asynccontextmanager
async def toolroll_serve(words: Sequence[str]) -> AsyncIterator[str]:
    """The address of `toolroll serve`, whose `words` have port 0. It ends with status 0."""
    server = await asyncio.create_subprocess_exec(*TOOLROLL, *words, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        line = (await asyncio.wait_for(server.stdout.readline(), PATIENCE)).decode()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line
        yield found.group()
    finally:
        server.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(server.wait(), PATIENCE) == 0


class ServerFailed(RuntimeError):
    """A server did not come up; the text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running process."""

    url: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def log_tail(self) -> str:
        return tail(self.log, 40)


def free_ports(count: int) -> list[int]:
    """Different ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def get_json(url: str, *, timeout: float = 10.0) -> tuple[int, Any]:
    """Status and JSON (None if it is not JSON) of a GET, past any proxy of the environment."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        connection.request("GET", f"/{path}")
        response = connection.getresponse()
        body = response.read()
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, None
    finally:
        connection.close()


def answers(url: str) -> bool:
    """Whether a GET of `url` gives a 200 now."""
    try:
        return get_json(url, timeout=30.0)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


@contextmanager
def serving(
    command: Callable[[int], Sequence[str]],
    *,
    ready: str,
    environment: Mapping[str, str],
    log: Path,
    name: str,
) -> Iterator[Server]:
    """Run `command(port)` until the context closes; open once a GET of the path `ready` gives a
    200.

    Its temporary files go where it closes. A port that was taken in the moment between is tried
    anew, twice at most.
    """
    # short, because it contains socket paths
    with tempfile.TemporaryDirectory(prefix="srv-", ignore_cleanup_errors=True) as scratch:
        for attempt in (1, 2, 3):
            port = free_ports(1)[0]
            process = _start(command(port), {**environment, "TMPDIR": scratch}, log)
            try:
                try:
                    _wait(process, f"http://{HOST}:{port}{ready}", log, name)
                except ServerFailed as error:
                    if attempt < 3 and _PORT_TAKEN.search(str(error)):
                        continue
                    raise
                yield Server(f"http://{HOST}:{port}", port, process, log)
                return
            finally:
                kill_group(process)


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with log.open("ab") as file:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, name: str) -> None:
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < START_DEADLINE:
        if process.poll() is not None:
            raise ServerFailed(
                f"{name} exited with {process.returncode} after {seconds:.0f} s:\n{tail(log, 60)}"
            )
        if answers(url):
            return
        time.sleep(_POLL)
    raise ServerFailed(f"{name} did not answer {url} in {START_DEADLINE:.0f} s:\n{tail(log, 60)}")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started: SIGTERM, a moment to clean up, SIGKILL."""
    # the session leader also leads the group, and its id stays in use while a member lives
    group = process.pid
    if process.poll() is None:
        # only to the leader: it treats the end of one of its processes as a crash
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    process.wait(30)
    with suppress(AssertionError):
        wait_until(lambda: not members(group), pause=0.05)


def members(group: int) -> list[int]:
    """The living processes of a process group."""
    return [pid for pid, _, own in living() if own == group]


def living() -> Iterator[tuple[int, int, int]]:
    """The ids of all living processes, of their parents and of their groups."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, parent, group = stat.read_text().rpartition(")")[2].split()[:3]
            if state != "Z":
                yield int(stat.parent.name), int(parent), int(group)
