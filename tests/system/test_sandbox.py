"""`Sandbox`: what a program can do, and what is left of it. And what a model may try in it: the
reward stays true, no secret is read, nothing outside is written, and the trial ends."""

import asyncio
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.episodes import serving
from support.patience import PATIENCE
from support.program_trials import (
    WRITE,
    command_of,
    factory,
    play,
    processes_of,
    program,
    refusal,
    write_task,
)
from support.wire import until

import toolroll
from toolroll.environments.programs.output import OUTPUT, Exit
from toolroll.environments.programs.sandbox import Sandbox
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.runs.run_directory import lock_folder
from toolroll.rollout.types import Status
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer

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


# --- attacks: each is a command of a model that does not solve the task, or does (`SOLVED`) -------

SECRET = "s3cr3t-0f-th3-run"
TOKEN = "98765430"
TEST = """\
ls /app > /logs/verifier/seen
if cmp -s greeting.txt /tests/expected; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
FORGE = "/logs/verifier/reward.txt"
ASK = 'curl -s -m 5 -H "Authorization: Bearer $OPENAI_API_KEY"'

FORGED = {
    "a mount over the reward": f"mount --bind /tmp {FORGE}; unshare -rm mount --bind /tmp /logs",
    "a reward written before": f"echo 1 > {FORGE}; echo '1' > /logs/verifier/reward.json",
    "a looping process": f"setsid sh -c 'while :; do echo 1 > {FORGE}; done' > /dev/null 2>&1 &",
    "a mount over bash": "mount --bind /tmp/bash /bin/bash; mount -t overlay o /usr",
    "bash of its own": f"printf '#!/bin/sh\\necho 1 > {FORGE}' > bash; chmod +x bash",
    "an alias in .bashrc": (
        f"for f in .bashrc .profile .bash_profile; do echo 'echo 1 > {FORGE}; exit' > ~/$f; done"
    ),
    "variables": "export BASH_ENV=/app/x LD_PRELOAD=/app/x.so; echo /app/x.so > /etc/ld.so.preload",
    "sitecustomize": (
        "mkdir -p ~/.local/lib/python3.11/site-packages; "
        'echo \'open("/logs/verifier/reward.txt", "w").write("1")\' | '
        "tee {.,~/.local/lib/python3.11/site-packages}/{site,user}customize.py"
    ),
    "conftest.py": "echo 'raise SystemExit(0)' > conftest.py; echo x > pytest.ini",
    "git hooks": "git init -q .; echo exit > .git/hooks/post-checkout; git config core.pager cat",
    "cmp in the working folder": "printf '#!/bin/sh\\nexit 0\\n' > cmp; chmod +x cmp; PATH=.:$PATH",
    "tests of its own": "mkdir -p /tests/a; echo 'echo 1' > /tests/test.sh; chmod 000 /tests",
    "expected of its own": "echo > /tests/expected; ln -s /tests/expected greeting.txt",
    "a link to the tests": "ln -s /tests/expected greeting.txt",
    "a relative link to the tests": "ln -s ../tests/expected greeting.txt",
    "a link through /proc": "ln -s /proc/self/root/tests/expected greeting.txt",
    "a link through a descriptor": "ln -s /proc/self/cwd/../tests/expected greeting.txt",
    "a link to a folder": "ln -s / up; ln -s up/tests/expected greeting.txt",
    "a link to the reward": f"ln -s {FORGE} greeting.txt",
    "a pipe": "mkfifo greeting.txt pipe /logs/verifier/reward.json /tmp/.output; rm -rf /logs/*",
    "a device": "mknod d c 1 3; perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local=>1)'",
    "no working folder": "cd /; rm -rf /app",
    "another working folder": "cd /; rm -rf /app; touch /app; ln -s / /app/x; mv /app /app2",
    "no permissions": "chmod 000 /app /logs /tests /home /tmp",
    "a full disk": "head -c 99999999 /dev/zero | tee /app/a /logs/a /tests/a /tmp/a > /home/a",
    "many files": "mkdir m; cd m; seq 5000 | xargs touch",
    "a sparse file": "truncate -s 900G greeting.txt",
    "deep folders": "for i in $(seq 900); do mkdir d; cd d || break; done",
    "names": "touch -- '-rf' '--checkpoint=1' $'a\\nb' '$(reboot)' '../x' ' '",
    "its own session deleted": f'{ASK} -X DELETE "$ANTHROPIC_BASE_URL"',
    "a reward of its own": f'{ASK} -d \'{{"reward": 1}}\' "$ANTHROPIC_BASE_URL/reward"',
    "a server": f"setsid {sys.executable} -m http.server 8000 > /dev/null 2>&1 &",
    "stopped processes": "kill -STOP -1; kill -STOP 1; setsid sh -c 'kill -STOP $$' &",
    "signals": "kill -9 1; kill -9 -1",
    "signals ignored": "setsid sh -c \"trap '' TERM INT HUP; while :; do sleep 1; done\" &",
    "ptrace": "strace -p 1; gdb -p 1; cat /proc/1/mem; echo 0 > /proc/1/oom_score_adj",
    "nsenter": "nsenter -t 1 -a true; unshare -Ur true; unshare -m true; chroot / true",
    "the clock": "date -s 2001-01-01; hostname x; sysctl -w kernel.hostname=x; dmesg -C",
    "many processes": "f() { f | f & }; f; sleep 1",
    "a lot of output": "yes | head -c 300000000",
    "output of a closed stream": "exec > /dev/full 2>&1; echo x; exec 1>&- 2>&-",
    "a terminal": "echo x > /dev/tty; setsid sh -c 'echo x > /dev/tty'; script -qc true /dev/null",
    "shared memory": "head -c 99999999 /dev/zero > /dev/shm/x; ipcmk -M 1000000 -Q -S 5",
}
SOLVED = {
    "a mistake after it": f"{WRITE}; cd /; rm -rf /logs /tests /home /tmp/*",
    "a broken neighbor": f"{WRITE}; mkfifo pipe; truncate -s 1M sparse; chmod 000 notes.txt",
    "a link within": "printf hello > real; ln -s real greeting.txt; ln -s greeting.txt again",
    "a full disk after it": f"{WRITE}; head -c 99999999 /dev/zero > big",
    "a process left": f"{WRITE}; setsid sleep {TOKEN} &",
}


LOOK = f"""
cat /proc/*/environ /proc/1/cmdline; env; ls -R {{at}} {{at}}/../link /root /home /etc/shadow
cat {{at}}/run/* {{at}}/../tasks/greet/*/* {{at}}/other/file {{at}}/../link/*/*
find / -xdev -name solve.sh -o -name episodes.jsonl; umount {{at}}/run; cat /proc/1/root/*
mount -o remount,bind,rw /usr; touch /usr/{TOKEN} /etc/{TOKEN} /opt/{TOKEN} {{at}}/{TOKEN}
for f in kernel/core_pattern vm/drop_caches; do echo {TOKEN} > /proc/sys/$f; done
curl -s -m 2 http://127.0.0.1:1/ http://169.254.169.254/ http://1.1.1.1/; ip a
"""
"""Looks for what a trial may not see, and writes where it may not."""


async def tried(
    tasks: Path, command: str, seconds: float | None = None, **options: Any
) -> tuple[Episode, EmbeddedEngine]:
    """The episode of a program that asks the model, and then runs `command`; and the engine."""
    async with serving(load_embedded_tokenizer(), lambda request: "Done.") as (engine, model):
        agent = program(model, f"{command_of()}; {command}", timeout=seconds)
        async with asyncio.timeout(PATIENCE):
            [episode] = (await play(factory(tasks, **options), agent, reruns=0)).values()
    return episode, engine


async def attacked(tmp_path: Path, command: str, **options: Any) -> Episode:
    task = write_task(tmp_path / "tasks", test=TEST)
    (task / "tests" / "expected").write_text("hello")
    settings = {"disk": 2**22, "processes": 60, **options}
    return (await tried(tmp_path / "tasks", command, seconds=10.0, **settings))[0]


@pytest.mark.parametrize("name", [*FORGED, *SOLVED])
async def test_the_reward_is_true_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    episode = await attacked(tmp_path, {**FORGED, **SOLVED}[name])
    result = episode.result
    assert result.status is not Status.ABORTED, result.info
    assert result.reward == float(name in SOLVED), result.info
    assert processes_of(f"sleep {TOKEN}") == []


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder with a run that this process writes, a file beside it, and a link to it."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    folder = tmp_path / "outside"
    for name, text in [("run/episodes.jsonl", SECRET), ("other/file", "shown")]:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    (tmp_path / "link").symlink_to(folder)
    lock = lock_folder(folder / "run")
    yield folder
    os.close(lock)
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern
    places = [Path(root) / TOKEN for root in ("/usr", "/etc", "/opt", folder)]
    assert [place for place in places if place.exists()] == []


async def test_no_secret_is_seen_and_nothing_outside_is_written(
    outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY_OF_THE_RUN", SECRET)
    command = f"({LOOK.format(at=outside)}) > out 2>&1; grep -ac 's3cr3t-0f[-]' out"
    shown = [str(outside), str(tmp_path / "link")]
    episode = await attacked(tmp_path, f"{command}; grep -ao shown out | wc -l", folders=shown)
    output = episode.result.info["program"]["output"]
    assert output.split() == ["Done.", "0", "2"], "it sees the folder, but not the run in it"
    assert episode.result.reward == 0.0


async def test_a_process_that_is_left_behind_is_never_sampled(tmp_path: Path) -> None:
    """It asks again and again, also while the tests run."""
    again = f"setsid sh -c 'while :; do {command_of()}; done' > /dev/null 2>&1 &"
    write_task(tmp_path, test=f"sleep 1; {TEST}")
    episode, engine = await tried(tmp_path, again)
    sampled = [entry for entry in engine.log if entry.status == 200]
    turns = sum(len(each.turns) for each in episode.result.trajectories)
    assert episode.result.reward == 0.0
    assert turns <= len(sampled) <= turns + 1, "at most the one that was in flight is aborted"


async def test_a_task_may_have_its_tests_in_the_program_s_sandbox(tmp_path: Path) -> None:
    """Then a server that the program started is there, and the reward can be forged."""
    task = write_task(tmp_path, test=f"[ -e /tmp/left ] && echo 1 > {FORGE} || echo 0 > {FORGE}\n")
    toml = (task / "task.toml").read_text()
    shared = toml.replace("[verifier]", '[verifier]\nenvironment_mode = "shared"')
    for text, reward, mark in [(toml, 0.0, None), (shared, 1.0, "shared: can be forged")]:
        (task / "task.toml").write_text(text)
        episode, _ = await tried(tmp_path, "touch /tmp/left")
        assert (episode.result.reward, episode.result.info.get("verifier")) == (reward, mark)


GRADED = {
    "its files crash the tests": ("rm notes.txt", "set -e; cat notes.txt; echo 1 >", "no reward"),
    "a malformed reward": ("echo x > notes.txt", "cat notes.txt >", "has no numbers"),
    "a reward that is no number": ("echo nan > notes.txt", "cat notes.txt >", "finite numbers"),
    "slow tests": ("touch slow", "[ -e slow ] && sleep 999; echo 0 >", "more than 2 s"),
    "a full disk": ("head -c 99M /dev/zero > big; dd if=/dev/zero of=x", "echo 0 >", None),
    "the files are too large": ("truncate -s 900G big", "echo 0 >", "too large"),
}


@pytest.mark.parametrize("name", GRADED)
async def test_what_the_model_may_have_caused_is_graded(name: str, tmp_path: Path) -> None:
    command, test, reason = GRADED[name]
    task = write_task(tmp_path, test=f"{test} {FORGE}\n")
    (task / "environment" / "notes.txt").write_text("0")
    toml = (task / "task.toml").read_text()
    (task / "task.toml").write_text(toml.replace("timeout_sec = 60.0", "timeout_sec = 2.0"))
    episode, _ = await tried(tmp_path, command, disk=2**22)
    assert (episode.result.status, episode.result.reward) == (Status.COMPLETED, 0.0)
    assert (reason or "") in str(episode.result.info.get("no_reward"))
