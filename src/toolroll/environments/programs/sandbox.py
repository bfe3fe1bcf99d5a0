"""`Sandbox`: the file system and the processes of one trial, made of Linux namespaces.

The sandbox sees the files of this machine read-only. `/app`, `/home`, `/logs`, `/tests`,
`/solution` and `/tmp` are its own: they are in memory, and empty at the start, except that this
interpreter and the folders in `PATH` stay visible below `/home` and `/tmp`. If a program fills
them, `/tests` and `/logs/verifier` still have room. A sandbox protects the machine from mistakes of
an agent, not from attacks.

Invariants: all processes of a sandbox end with its first process, and its files end with its
processes. The first process ends with `close`, and also if this process is killed. So nothing is
left, whatever a program starts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from toolroll.rollout.errors import EnvironmentFailure, UsageError

OUTPUT = 65_536
"""The number of bytes that are kept from the end of a program's output."""
_OWN = "app home logs/agent logs/artifacts logs/verifier tests solution tmp"
_SHARED = "/home/", "/tmp/"
_START = r"""
set -eu
read_only() { mount -o remount,bind,ro "$1" || mount -o remount,bind,ro,nosuid,nodev "$1"; }
size=$1 own=$2; shift 2
read -r pid _ < /proc/self/stat
root=/media; [ -d $root ] || root=/srv
mount -t tmpfs -o "mode=755,size=$size" toolroll $root
cd $root
mkdir -p proc dev $own
chmod 1777 tmp
for name in tests logs/verifier; do mount -t tmpfs -o "mode=755,size=$size" toolroll $name; done
for path in /*; do
  name=${path#/}
  if [ -L "$path" ]; then cp -P "$path" .
  elif [ -d "$path" ] && { [ "$name" = dev ] || [ ! -e "$name" ]; }; then
    mkdir -p "$name"
    mount --rbind "$path" "$name"
    [ "$name" = dev ] || read_only "$name"
  fi
done
mkdir .shm; mount --bind .shm dev/shm
mount -t proc proc proc || mount --rbind /proc proc
while [ "$1" != -- ]; do
  [ -e ".$1" ] || { mkdir -p ".$1"; mount --rbind "$1" ".$1"; read_only ".$1"; }
  shift
done
shift
for path; do [ ! -d ".$path" ] || mount -t tmpfs -o ro,size=4k hidden ".$path"; done
pivot_root . .
umount -l .
echo "$pid"
exec sh -c 'exec > /dev/null 2>&1; while :; do sleep 2147483 & wait; done'
"""
"""Makes the root, writes the process's id, and then waits for orphans as the first process."""
_RUN = 'exec > "$1" 2>&1 && cd "$2" && exec bash -c "$3"'
_OUTPUT_FILE = "/tmp/.output"


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a program. `status` is None if the program was stopped at its time limit.
    `output` is the end of what it wrote.
    """

    status: int | None
    output: str


class Sandbox:
    """The sandbox of one trial, while its `async with` block runs, or from `start` to `close`.

    `folders` of this machine that are below one of the sandbox's own folders, such as `/tmp`, are
    visible too, read-only. `hidden` folders are empty. `disk`: the limit of all files, in bytes.
    `memory`: the limit of the data of each process, in bytes. `processes` has no effect for root.

        async with Sandbox() as sandbox:
            print(await sandbox.run("ls -la", {}))
    """

    def __init__(
        self,
        folders: Sequence[str | Path] = (),
        hidden: Sequence[str | Path] = (),
        *,
        disk: int = 2**30,
        memory: int | None = None,
        processes: int = 1024,
    ) -> None:
        self._disk = disk
        self._limits = [f"--nproc={processes}", "--core=0"]
        if memory is not None:
            self._limits.append(f"--data={memory}")
        # sorted, so that a folder comes before those in it
        self._folders = [*sorted({*map(str, folders), *_programs()}), "--", *map(str, hidden)]
        self._process: asyncio.subprocess.Process | None = None
        self._pid = 0
        self._enter: list[str] = []

    async def __aenter__(self) -> Sandbox:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the first process. Raise `UsageError` if this machine has no user namespaces."""
        programs = {name: _found(name) for name in ("setpriv", "unshare", "nsenter", "prlimit")}
        names = "--user --map-root-user --mount --pid --ipc --fork --kill-child"
        self._process = process = await asyncio.create_subprocess_exec(
            *(programs["setpriv"], "--pdeathsig", "KILL", programs["unshare"], *names.split()),
            *("sh", "-c", _START, "sh", str(self._disk), _OWN, *self._folders),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self._pid = int(await process.stdout.readline() or b"0")
        if not self._pid:
            problem = (await process.stderr.read()).decode(errors="replace").strip()
            raise UsageError(
                f"the local back end needs user namespaces, which this machine refuses: {problem}"
            )
        names = "--user --preserve-credentials --mount --pid --ipc"
        self._enter = [programs["setpriv"], "--pdeathsig", "KILL", programs["nsenter"]]
        self._enter += [
            "--target",
            str(self._pid),
            *names.split(),
            programs["prlimit"],
            *self._limits,
        ]

    async def run(
        self,
        command: str,
        variables: Mapping[str, str],
        *,
        folder: str = "/app",
        time_limit: float | None = None,
    ) -> Exit:
        """Run `command` with bash in `folder`, with `variables` as its environment besides `HOME`
        and `PATH`. Return once it ends, even if processes that it started go on. After `time_limit`
        seconds, all processes of the sandbox are killed, except the first one.
        """
        variables = {"HOME": "/home", "PATH": os.environ.get("PATH", os.defpath), **variables}
        words = ("bash", "-c", _RUN, "bash", _OUTPUT_FILE, folder, command)
        try:
            async with asyncio.timeout(time_limit):
                status: int | None = await self._do(*words, variables=variables)
        except TimeoutError:
            status = None
            await self.kill()
        output = await self._output("tail", "-c", str(OUTPUT), _OUTPUT_FILE) or b""
        return Exit(status, output.decode(errors="replace"))

    async def kill(self) -> None:
        """Kill all processes, except the first one."""
        await self._do("bash", "-c", "kill -9 -1")

    async def upload(self, source: Path, target: str) -> None:
        """Copy the content of the folder `source` to the folder `target`, which is made."""
        with TemporaryFile() as file:
            await asyncio.to_thread(_pack, source, file)
            file.seek(0)
            script = 'mkdir -p "$1" && tar -C "$1" --no-same-owner -xf -'
            if await self._do("bash", "-c", script, "bash", target, stdin=file):
                raise EnvironmentFailure(f"the files for {target} could not be copied")

    async def read(self, path: str) -> bytes | None:
        """Return at most `OUTPUT` bytes of the file `path`, or None if there is no such file."""
        return await self._output("head", "-c", str(OUTPUT), path)

    async def close(self) -> None:
        """Kill all processes, and wait for their end. The files end with them."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:  # otherwise all have ended, and the id may be another's
                with suppress(ProcessLookupError):
                    os.kill(self._pid or process.pid, signal.SIGKILL)
            await process.communicate()

    async def _output(self, *words: str) -> bytes | None:
        with TemporaryFile() as file:
            failed = await self._do(*words, output=file)
            file.seek(0)
            return None if failed else file.read()

    async def _do(
        self,
        *words: str,
        variables: Mapping[str, str] | None = None,
        stdin: IO[bytes] | int = asyncio.subprocess.DEVNULL,
        output: IO[bytes] | int = asyncio.subprocess.DEVNULL,
    ) -> int:
        """Run the program `words`, and return its exit status. Raise `EnvironmentFailure` if the
        sandbox has ended.
        """
        if self._process is None:
            raise EnvironmentFailure("the sandbox is not running")
        process = await asyncio.create_subprocess_exec(
            *self._enter,
            *words,
            env=variables,
            stdin=stdin,
            stdout=output,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._process.returncode is not None:
            raise EnvironmentFailure("the sandbox ended, perhaps because memory was short")
        return status


def _programs() -> list[str]:
    """Return the folders of this interpreter and of `PATH` that are below `/home` or `/tmp`."""
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    folders = (sys.prefix, sys.base_prefix, *path)
    shared = [folder for folder in folders if folder.startswith(_SHARED)]
    return list(filter(os.path.isdir, shared))  # `Path.is_dir` raises if it is not permitted


def _found(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        raise UsageError(f"the local back end needs the Linux program {name} (of util-linux)")
    return path


def _pack(source: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(source, arcname=".")
