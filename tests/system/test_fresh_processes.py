"""What only a second process shows: a held folder, an endless thread, README's example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import printed, python
from support.source import ROOT

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.run_directory import RunDirectory


def test_what_blocks_for_ever_does_not_keep_the_process() -> None:
    program = """
import asyncio, time
from toolroll.rollout.runtime.threads import Threads
async def main():
    threads = Threads(2)
    try:
        await asyncio.wait_for(threads.run_in_thread(time.sleep, 600), 0.1)
    except TimeoutError:
        print("late", flush=True)
asyncio.run(main())
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")


LEFT_BEHIND = """
import asyncio, sys
from toolroll.rollout.runtime import event_loop
how, kind = sys.argv[1:]
async def leave():
    raise KeyboardInterrupt
def call():
    raise KeyboardInterrupt
async def main():
    loop = asyncio.get_running_loop()
    left = loop.create_task(leave()) if how == "task" else loop.call_soon(call)
    for _ in range(3):
        await asyncio.sleep(0)
    return "went on"
if kind == "asyncio":
    event_loop._loop_factory = lambda: None
print(event_loop.run(main()))
"""


@pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
@pytest.mark.parametrize("how", ["task", "callback"])
def test_an_interrupt_of_code_left_behind_is_not_ctrl_c(how: str, kind: str) -> None:
    """In a fresh process, whose handler of SIGINT is Python's own."""
    done = python("-c", LEFT_BEHIND, how, kind)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


HOLDER = """
import sys
from pathlib import Path
from toolroll.rollout.runs.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1]), "pond", {}):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match="another process is writing into"),
            RunDirectory(tmp_path, "pond", {}),
        ):
            pass
        owner.kill()  # however it ends, the folder is free
    with RunDirectory(tmp_path, "pond", {}):
        pass


def test_the_example_prints_what_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = ROOT / "examples" / "quickstart.py"
    code, shown = re.search(
        r"```python\n(async def main.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    assert code in script.read_text(encoding="utf-8")
    assert printed(script) == shown
