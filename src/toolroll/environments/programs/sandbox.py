"""`Sandbox`: the file system, the processes and the network of one trial, made by bubblewrap.

A sandbox sees only what is listed: the machine's `/usr`, a part of `/etc`, this interpreter, the
folders in `PATH` and those that are named, all read-only. `OWN` folders are its own: in memory, and
empty at the start. Its network is its own loopback, unless it is the machine's.

Invariants:

- Its processes have no capability, cannot get one, cannot make user namespaces, and see no variable
  of this process. If this process is root, they are those of another user, because a user namespace
  alone lets them write what root may write in `/proc/sys`.
- Output goes to this process, and never to a path in the sandbox.
- Every step has a time limit. At the limit of a step that is not the program's own, the sandbox
  ends.
- All processes of a sandbox end with its first process, and its files end with its processes. The
  first process ends with `close`, and also if this process is killed: it reads from a socket whose
  other end only this process has. (bwrap's own `--die-with-parent` leaves a process behind if it
  ends while a sandbox starts.)

Harbor's interpreter imports this module too, which needs only the standard library.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import re
import shlex
import signal
import socket
import sys
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal

from toolroll.environments.programs.output import OUTPUT, Exit, Output
from toolroll.environments.programs.visible import (
    OWN,
    SYSTEM,
    below,
    find,
    hidden_places,
    is_root,
    locked_folders,
    visible_folders,
)
from toolroll.rollout.errors import EnvironmentFailure, UsageError

LIMIT = 120.0
"""The time limit of every step that is not a program's own, in seconds."""
_MADE = ("/logs/agent", "/logs/artifacts", "/logs/verifier")
_ETC = """alternatives bash.bashrc ca-certificates fonts group host.conf hosts inputrc ld.so.cache
ld.so.conf ld.so.conf.d localtime magic mime.types nsswitch.conf os-release passwd perl
pki/tls/certs profile protocols python3 services shells ssl/certs ssl/openssl.cnf terminfo timezone
""".split()
_ROUNDS = 200
_FIRST_USER = 1_000_000_000
"""If this process is root: the user of a sandbox's processes is this number plus the id of the
first one. So sandboxes share no keys and no limits of users.
"""
_SYSCALL = ctypes.CDLL(None).syscall
_KEYCTL = {"x86_64": 250, "aarch64": 219}.get(platform.machine())
_JOIN_SESSION_KEYRING = 1
_ISOLATED = """--unshare-all --unshare-user --new-session --as-pid-1
--uid 0 --gid 0 --cap-add ALL --info-fd 1 --userns-block-fd 0"""
_START = """chown 0:0 "$@" && echo 0 > /proc/sys/user/max_user_namespaces && exec """
_IDLE = "echo >&2; exec env --ignore-signal=CHLD cat > /dev/null 2>&1"
"""The first process ignores the end of orphans, so the kernel forgets them. The empty line says
that it runs.
"""
_RUN = 'cd -- "$1" && exec bash -c "$2"'
_EXTRACT = 'mkdir -p -- "$1" && exec tar -C "$1" --no-same-owner -xf -'
_INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
Network = Literal["none", "host"]


class Sandbox:
    """The sandbox of one trial, while its `async with` block runs, or from `start` to `close`.

    `folders` of this machine are visible too, read-only, but `hidden` ones below them are empty,
    and so is the folder of a run that this process writes. `own`: writable folders besides `OWN`.
    `disk`: the limit of the files of each writable folder, in bytes. `memory`: the limit of the
    data of each process, in bytes. `processes`: the limit of processes.

        async with Sandbox() as sandbox:
            print(await sandbox.run("ls -la", {}))
    """

    def __init__(
        self,
        folders: Sequence[str | Path] = (),
        hidden: Sequence[str | Path] = (),
        *,
        own: Sequence[str] = (),
        network: Network = "none",
        disk: int = 2**30,
        memory: int | None = None,
        processes: int = 1024,
    ) -> None:
        self.network = network
        self._disk = disk
        self._limits = [f"--nproc={processes}", "--core=0"]
        if memory is not None:
            self._limits.append(f"--data={memory}")
        self._folders = visible_folders(folders)
        self._hidden = [*hidden, *locked_folders()]
        self._own = [*OWN, *(folder for folder in own if not below(folder, OWN))]
        self._process: asyncio.subprocess.Process | None = None
        self._outputs: list[Output] = []
        self._pid = 0

    async def __aenter__(self) -> Sandbox:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the first process. Raise `UsageError` if this machine cannot make sandboxes."""
        argv = [find("bwrap", "bubblewrap"), *_ISOLATED.split(), *self._files()]
        argv += ["--share-net"] if self.network == "host" else []
        # If this process is root, so is the first process, which programs then cannot change.
        drop = " ".join([*_drop(), "--ambient-caps=-all"])
        argv += ["--", "/bin/sh", "-c", f"{_START}{drop} sh -c {shlex.quote(_IDLE)}", "sh"]
        self._life, theirs = socket.socketpair()
        reading, writing = socket.socketpair()
        with theirs, writing:
            self._process = process = await asyncio.create_subprocess_exec(
                *(*argv, *self._own, "/dev/shm", *_MADE),
                cwd="/",
                env={},
                preexec_fn=_leave_keys,
                stdin=theirs.fileno(),
                stdout=writing.fileno(),
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[reading.fileno()],  # or bwrap fails to write if this process has ended
                start_new_session=True,
            )
        try:
            with reading:
                async with asyncio.timeout(LIMIT):
                    error_line = await self._begin(process, reading)
        except (OSError, TimeoutError) as error:
            error_line = str(error).encode() or b"it did not start"
        if error_line != b"\n":
            await self.close()
            raise UsageError(_refusal(error_line.decode(errors="replace").strip()))

    async def _begin(self, process: asyncio.subprocess.Process, info: socket.socket) -> bytes:
        """Set the users of the sandbox, and return the first line of its errors: an empty one if it
        has started. `info` begins with the id of its first process, unless it ended.
        """
        assert process.stderr is not None
        info.setblocking(False)
        child_info = await asyncio.get_running_loop().sock_recv(info, 4096)
        if child_info:
            self._pid = int(re.findall(rb"\d+", child_info)[0])
            _map_users(self._pid)
            self._life.send(b"x")
        return await process.stderr.readline()

    def _files(self) -> list[str]:
        """Return the arguments that make the file system."""
        argv = ["--proc", "/proc", "--dev", "/dev", "--perms", "0755", "--dir", "/etc"]
        for system in map(Path, SYSTEM):
            if system.is_symlink():
                argv += ["--symlink", str(system.readlink()), str(system)]
            elif system.is_dir():
                argv += ["--ro-bind", str(system), str(system)]
        names = [*_ETC, "resolv.conf"] if self.network == "host" else _ETC
        for path in (f"/etc/{name}" for name in names):
            for up in list(Path(path).parents)[-3::-1]:  # below /etc
                argv += ["--perms", "0755", "--dir", str(up)]
            argv += ["--ro-bind-try", path, path]
        for path in (*self._own, "/dev/shm"):
            argv += ["--size", str(self._disk), "--perms", "1777", "--tmpfs", path]
        for path in _MADE:
            argv += ["--dir", path]
        for path in self._folders:
            for up in reversed(Path(path).parents[:-1]):  # or only root could enter them
                argv += ["--perms", "0755", "--dir", str(up)]
            argv += ["--ro-bind", path, path]
        for path in hidden_places([*self._folders, "/usr"], self._hidden):
            argv += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        return [*argv, "--remount-ro", "/dev", "--remount-ro", "/"]

    async def run(
        self,
        command: str,
        variables: Mapping[str, str],
        *,
        folder: str = "/app",
        time_limit: float | None = None,
        errors: Output | None = None,
    ) -> Exit:
        """Run `command` with bash in `folder`, with `variables` as its environment besides `HOME`
        and `PATH`. Return once it ends, even if processes that it started go on. After `time_limit`
        seconds, all processes of the sandbox are killed, except the first one. The error stream is
        in `errors`, or else in the output.
        """
        variables = {"HOME": "/home", "PATH": os.environ.get("PATH", os.defpath), **variables}
        output = self.new_output()
        files = (output.file, (errors or output).file)
        argv = ("bash", "-c", _RUN, "bash", folder, command)
        try:
            status: int | None = await self._do(
                *argv, variables=variables, outputs=files, limit=time_limit
            )
        except TimeoutError:
            status = None
            await self.kill()
        return Exit(status, output.text().decode(errors="replace"))

    async def kill(self) -> None:
        """Kill all processes, except the first one. If that fails, end the sandbox.

        This process kills them, because they could kill a process in the sandbox first.
        """
        for _ in range(_ROUNDS):
            if not await asyncio.to_thread(self._kill_others):
                return
            await asyncio.sleep(0.01)
        await self.close()
        raise EnvironmentFailure("the processes of the sandbox could not be killed")

    def _kill_others(self) -> int:
        """Stop, then kill all processes in the sandbox's process namespace, except the first one.
        Return how many there were.
        """
        first = Path(f"/proc/{self._pid}")
        descriptors: list[int] = []
        for process in Path("/proc").glob("[1-9]*"):
            with suppress(OSError):  # it ended
                descriptor = os.pidfd_open(int(process.name))
                if process != first and _alive_beside(process, first):
                    descriptors.append(descriptor)
                else:
                    os.close(descriptor)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for descriptor in descriptors:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        return len(descriptors)

    async def pack(self, paths: Sequence[str], file: IO[bytes], *, kill: bool = True) -> bool:
        """Kill all processes, and write an archive of `paths` to `file`. Return whether it holds
        all.

        Only files, folders and links are packed, and links only if they lead to something in
        `paths`, or to a file of the machine: when the archive is unpacked, a link may not lead to
        what was not there before, such as tests.
        """
        if kill:
            await self.kill()
        args = [str(self._disk), *paths, "--", "/usr", *self._folders]
        return not await self._step(*_python("pack"), *args, outputs=(os.dup(file.fileno()), None))

    async def unpack(
        self, file: IO[bytes], target: str = "/", *, within: Sequence[str] | None = None
    ) -> None:
        """Copy the files in the archive `file` to the folder `target`, which is made. Raise
        `EnvironmentFailure` if one of them would not be in a folder of `within`, or is a link that
        leads elsewhere, but to files of the machine.
        """
        if within is not None:
            allowed = [*within, "/usr", *self._folders]
            await asyncio.to_thread(_check_archive, file, within, allowed)
        file.seek(0)
        if await self._step("/bin/sh", "-c", _EXTRACT, "sh", target, stdin=file.fileno()):
            raise EnvironmentFailure(f"the files for {target} could not be copied")

    async def upload(self, source: Path, target: str) -> None:
        """Copy the file `source`, or the content of the folder, to the folder `target`."""
        with TemporaryFile() as file:
            await asyncio.to_thread(_archive, source, file)
            await self.unpack(file, target)

    async def read(self, path: str) -> bytes | None:
        """Return at most `OUTPUT` bytes of the file `path`. Return None if there is none, or if it
        is a link, a folder or a pipe.
        """
        output = self.new_output()
        failed = await self._step(*_python("read"), path, str(OUTPUT), outputs=(output.file, None))
        return None if failed else output.text()

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens in the sandbox's own network, on its loopback address."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            if await self._step(*_python("listen"), str(port), stdin=theirs.fileno()):
                raise EnvironmentFailure(f"nothing can listen on port {port} of the sandbox")
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            return socket.socket(fileno=descriptors[0])

    async def close(self) -> None:
        """Kill all processes, and wait for their end. The files end with them."""
        process, self._process = self._process, None
        if process is not None:
            self._life.close()  # it may still be starting
            # if it has ended, so have all, and the id may be another's
            if process.returncode is None and self._pid:
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            with suppress(TimeoutError):
                async with asyncio.timeout(LIMIT):
                    await process.communicate()
        while self._outputs:
            self._outputs.pop().close()

    def new_output(self) -> Output:
        """Return a pipe for the output of one program. It is closed with the sandbox."""
        self._outputs = [output for output in self._outputs if output.open]
        self._outputs.append(Output())
        return self._outputs[-1]

    async def _step(self, *argv: str, **streams: Any) -> int:
        """Run the program `argv` of this library. If it does not end, end the sandbox."""
        try:
            return await self._do(*argv, limit=LIMIT, **streams)
        except TimeoutError:
            await self.close()
            raise EnvironmentFailure(f"the sandbox did not react for {LIMIT:g} s") from None

    async def _do(
        self,
        *argv: str,
        variables: Mapping[str, str] | None = None,
        stdin: int | None = None,
        outputs: tuple[int | None, int | None] = (None, None),
        limit: float | None,
    ) -> int:
        """Run the program `argv`, and return its exit status. Close `outputs`. Raise
        `TimeoutError` at the limit, and `EnvironmentFailure` if the sandbox has ended.
        """
        enter = f"{find('nsenter')} --target {self._pid} --user --mount --pid --ipc --uts".split()
        enter += ["--net"] if self.network == "none" else []
        enter += [] if is_root() else ["--preserve-credentials"]
        try:
            if self._process is None or self._process.returncode is not None:
                raise EnvironmentFailure("the sandbox is not running")
            process = await asyncio.create_subprocess_exec(
                *(*enter, find("prlimit"), *self._limits, *_drop(), *argv),
                cwd="/",
                env=variables or {},
                preexec_fn=_leave_keys,
                stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
                stdout=outputs[0] or asyncio.subprocess.DEVNULL,
                stderr=outputs[1] or asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            for file in {output for output in outputs if output is not None}:
                os.close(file)
        try:
            async with asyncio.timeout(limit):
                status = await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if self._process is None or self._process.returncode is not None:
            raise EnvironmentFailure("the sandbox ended, perhaps because memory was short")
        return status


def _alive_beside(process: Path, first: Path) -> bool:
    """Return whether a process lives in the process namespace of `first`. Both are in `/proc`."""
    try:
        state = (process / "stat").read_bytes().rpartition(b") ")[2][:1]
        same = (process / "ns/pid").readlink() == (first / "ns/pid").readlink()
        return same and state not in b"ZX"
    except OSError:  # one of them has ended
        return False


def _leave_keys() -> None:
    """Get an empty keyring in place of this process's, where programs could find and leave keys."""
    if _KEYCTL is not None:
        _SYSCALL(_KEYCTL, _JOIN_SESSION_KEYRING, None)


def _map_users(pid: int) -> None:
    """Let the user 0 of the sandbox be this process's user, or one without a name if it is root."""
    users = {"uid": os.geteuid(), "gid": os.getegid()}
    if not is_root():
        Path(f"/proc/{pid}/setgroups").write_text("deny")
    for name, host_id in users.items():
        lines = f"0 {_FIRST_USER + pid} 1\n1 0 1\n" if is_root() else f"0 {host_id} 1\n"
        Path(f"/proc/{pid}/{name}_map").write_text(lines)


def _drop() -> list[str]:
    """Return the arguments that give up all capabilities."""
    return [find("setpriv"), "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def _python(function: str) -> list[str]:
    """Return the arguments that call `function` of `inside`, without the sandbox's own modules."""
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", _INSIDE, function]


def _refusal(problem: str) -> str:
    rule = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if rule.exists() and rule.read_text().strip() == "1":
        advice = "for AppArmor, set kernel.apparmor_restrict_unprivileged_userns to 0 with sysctl"
    else:
        advice = "a container needs CAP_SYS_ADMIN and an unmasked /proc"
    return f"this machine refuses to make a sandbox ({advice}): {problem}"


def _archive(source: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(source, arcname="." if source.is_dir() else source.name)


def _check_archive(file: IO[bytes], folders: Sequence[str], targets: Sequence[str]) -> None:
    """Raise `EnvironmentFailure` if a member of the archive `file` would not be in one of
    `folders`, or is a link to something that is not in one of `targets`.
    """
    file.seek(0)
    try:
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                path = os.path.normpath(f"/{member.name}")
                parent = os.path.dirname(path) if member.issym() else "/"  # noqa: PTH120
                link = os.path.normpath(os.path.join(parent, member.linkname))  # noqa: PTH118
                linked = member.issym() or member.islnk()
                valid = member.isfile() or member.isdir() or linked
                if not valid or not below(path, folders) or (linked and not below(link, targets)):
                    raise EnvironmentFailure(f"the files cannot be graded, because of {path}")
    except tarfile.TarError as error:
        raise EnvironmentFailure(f"the files cannot be unpacked: {error}") from error
