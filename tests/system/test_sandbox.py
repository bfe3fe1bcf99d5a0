"""`Sandbox`: what a program can do, and what is left of it."""

import asyncio
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.patience import PATIENCE
from support.program_trials import processes_of, refusal
from support.wire import until

import toolroll
from toolroll.environments.programs.output import OUTPUT, Exit
from toolroll.environments.programs.sandbox import Sandbox
from toolroll.rollout.errors import EnvironmentFailure, UsageError

pytestmark = pytest.mark.skipif(bool(refusal()), reason=f"needs user namespaces: {refusal()}")
KEEP = """
import asyncio, sys
from toolroll.environments.programs.sandbox import Sandbox
async def main():
    async with Sandbox() as sandbox:
        print("started", flush=True)
        await sandbox.run("setsid sleep {number} & sleep {number}", {{}})
asyncio.run(main())
"""
KILLED = """
import asyncio, os, signal
from toolroll.environments.programs.sandbox import Sandbox
Sandbox._begin = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(Sandbox(own=["{folder}"]).start())
"""


def test_it_is_imported_without_toolrolls_packages() -> None:
    source = Path(toolroll.__file__).parents[1]
    code = f"import sys; sys.path.append({str(source)!r}); import {Sandbox.__module__}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


async def test_commands_have_files_variables_and_limits_until_the_end(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "run.sh").write_text("echo ran\n")
    (tmp_path / "a" / "b" / "run.sh").chmod(0o755)
    (tmp_path / "a" / "link").symlink_to("/nowhere")
    async with Sandbox(memory=2**26) as sandbox:
        end = await sandbox.run("echo $A$HOME; pwd; echo x > file; exit 3", {"A": "a"})
        assert end == Exit(3, "a/home\n/app\n")
        assert await sandbox.read("/app/file") == b"x\n"
        assert await sandbox.read("/app/none") is None
        async with Sandbox() as other:
            assert await other.read("/app/file") is None
        await sandbox.upload(tmp_path / "a", "/app/new")
        end = await sandbox.run("b/run.sh; readlink link", {}, folder="/app/new")
        assert end == Exit(0, "ran\n/nowhere\n")
        end = await sandbox.run("head -c 300000 /dev/zero | tr '\\0' x; echo end", {})
        assert end.output == "x" * (OUTPUT - 4) + "end\n", "only the end of a long output is kept"
        end = await sandbox.run(f"{sys.executable} -c 'bytearray(2**28)'", {})
        assert (end.status, "MemoryError" in end.output) == (1, True)
        command = "touch seen; setsid sleep 87651 & sleep 87651"
        assert await sandbox.run(command, {}, time_limit=0.5) == Exit(None, "")
        assert processes_of("sleep 87651") == []
        assert await sandbox.run("ls", {}) == Exit(0, "file\nnew\nseen\n")
        assert await sandbox.run("setsid sleep 87652 & echo started", {}) == Exit(0, "started\n")
        assert processes_of("sleep 87652") != []
    assert processes_of("sleep 87652") == []
    with pytest.raises(EnvironmentFailure, match="not running"):
        await sandbox.run("true", {})


async def test_programs_below_a_hidden_folder_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        for part in ("venv/bin", "tools", "data/deep"):
            (folder / part).mkdir(parents=True)
        (folder / "secret").write_text("")
        for program in ("venv/bin/snake", "tools/tool"):
            (folder / program).write_text("#!/bin/sh\necho $0\n")
            (folder / program).chmod(0o755)
        monkeypatch.setattr(sys, "prefix", f"{folder}/venv")
        monkeypatch.setenv("PATH", f"{folder}/venv/bin:{folder}/tools", prepend=":")
        async with Sandbox([folder / "data" / "deep", folder / "data"]) as sandbox:
            end = await sandbox.run(
                f"snake; tool; cd {folder}; ls; touch {{data,data/deep,tools,venv}}/x", {}
            )
            assert (await sandbox.run("ls -A / /root /home /etc/shadow", {})).output
    names = [f"{folder}/venv/bin/snake", f"{folder}/tools/tool", "data", "tools", "venv"]
    assert end.output.split("\n")[:5] == names
    assert end.output.count("Read-only file system") == 4


async def test_after_its_end_a_sandbox_sends_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of its first process may be another process's by then."""
    async with Sandbox() as sandbox:
        process: Any = sandbox._process
        signals: list[Any] = []
        os.kill(sandbox._pid, signal.SIGKILL)
        await process.wait()
        monkeypatch.setattr(os, "kill", lambda *call: signals.append(call))
    assert signals == []


async def test_a_machine_without_the_programs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(UsageError, match="needs bwrap: install the package bubblewrap"):
        await Sandbox().start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_killed_process(number: int) -> None:
    marker = str(87_600_000 + number)
    with subprocess.Popen(
        [sys.executable, "-c", KEEP.format(number=marker)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        while not processes_of(f"sleep {marker}"):
            assert process.poll() is None
        os.kill(process.pid, number)
        process.wait(PATIENCE)
    while processes_of(f"sleep {marker}"):  # its parent's end reaches it after `wait`
        pass


async def test_nothing_is_left_of_a_process_killed_at_the_start() -> None:
    """bwrap then waits for the users of the sandbox, or writes the id of its first process."""
    folder = "/of-a-killed-process"
    code = KILLED.format(folder=folder)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await killed.wait() == -signal.SIGKILL
    await until(lambda: not processes_of(folder), "the sandbox ends")


async def test_a_program_that_kills_whatever_appears_is_killed() -> None:
    shoots = "import os\nwhile True:\n os.kill(-1, 9)"
    async with Sandbox() as sandbox:
        await sandbox.run(f"setsid {sys.executable} -c '{shoots}' & sleep 1", {})
        await sandbox.kill()
        listed = await sandbox.run("ps -e -o comm= > seen; sort seen", {})
    assert listed.output == "bash\ncat\nps\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user")
async def test_programs_cannot_change_the_first_process() -> None:
    async with Sandbox() as sandbox:
        for change in ("open('/proc/1/mem', 'r+b')", "os.kill(1, 9)"):
            ended = await sandbox.run(f'{sys.executable} -c "import os; {change}"', {})
            assert "PermissionError" in ended.output
        assert (await sandbox.run("true", {})).status == 0


ADDS_A_KEY = """
import ctypes, platform
add_key, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
call = ctypes.CDLL(None).syscall
for keyring in (-3, -4):
    key = call(add_key, b"user", b"toolroll-key", b"answer", 6, keyring)
    call(keyctl, 5, key, 0x3F3F3F3F)
"""


async def test_keys_stay_in_their_sandbox() -> None:
    async with Sandbox() as sandbox, Sandbox() as other:
        await sandbox.run(f"{sys.executable} -c '{ADDS_A_KEY}'; sleep 100 &", {})
        assert "toolroll-key" not in (await other.run("cat /proc/keys", {})).output


async def test_an_archive_only_writes_where_it_may(tmp_path: Path) -> None:
    async with Sandbox() as sandbox:
        for name, link in (("tests/conftest.py", ""), ("app/x", "/tests/expected"), ("a", "")):
            with (tmp_path / "a.tar").open("w+b") as file:
                with tarfile.open(fileobj=file, mode="w") as archive:
                    member = tarfile.TarInfo(name)
                    member.type, member.linkname = tarfile.SYMTYPE if link else b"0", link
                    archive.addfile(member)
                with pytest.raises(EnvironmentFailure, match=f"because of /{name}"):
                    await sandbox.unpack(file, within=["/app"])
