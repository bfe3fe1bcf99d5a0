"""`examples/learn_real` on the real SGLang server: all its parts, with two layers of its model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.learn_desk import teacher
from examples.learn_real.model import convert, package_file
from examples.learn_real.parts import ENDS
from examples.learn_real.references import reference_sample
from support.cache import cached_folder
from support.processes import START_DEADLINE, kill_group, members, tail
from support.servers import sglang_environment
from transformers import AutoTokenizer

from toolroll.environments.desk import DESK
from toolroll.rollout.template import ChatTemplate

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "learn_real"
STEPS = 3
SETTINGS = (
    f"--device cpu --layers 2 --held-out 2 --references 6 --batch 2 --warm-steps 2 "
    f"--rl-steps {STEPS} --groups 1 --group 4 --minutes 60 --save-every 0"
).split()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the model, made from the pieces of its file."""

    def build(folder: Path) -> None:
        pieces, content = [], package_file().read_bytes()
        for at in range(0, len(content), 60_000_000):
            pieces.append(tmp_path_factory.mktemp("pieces") / "piece")
            pieces[-1].write_bytes(content[at : at + 60_000_000])
        convert(pieces, folder, 2)

    sources = [EXAMPLE / "model.py", *sorted((EXAMPLE / "smollm2").iterdir())]
    return cached_folder("smollm2", tuple(path.read_bytes() for path in sources), build)


async def test_what_the_teacher_says_is_trained(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    template = ChatTemplate(tokenizer)
    for task in DESK.tasks("held-out")[:30]:
        sample = await reference_sample(template, task)
        cuts = np.flatnonzero(np.diff(sample.loss_mask)) + 1
        turns = np.split(sample.ids, cuts)[1::2]
        wanted = [f"{reply}<|im_end|>" for reply in teacher.replies(task)]
        assert [tokenizer.decode(turn) for turn in turns] == wanted
        assert sample.loss_mask[0] == 0


class Command:
    """The command as a process, which leads a group of its own."""

    def __init__(self, out: Path, log: Path) -> None:
        self.log = log
        path = os.pathsep.join(map(str, (ROOT / "tests", ROOT, ROOT / "src")))
        environment = sglang_environment({})
        environment["PYTHONPATH"] = f"{environment['PYTHONPATH']}{os.pathsep}{path}"
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.rehearsal", "--out", str(out), *SETTINGS],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, which takes less than a minute on an idle machine."""
        end = time.monotonic() + 2.5 * START_DEADLINE
        while not done():
            assert time.monotonic() < end, tail(self.log, 60)
            time.sleep(0.05)


def lines(path: Path) -> list[dict[str, Any]]:
    texts = path.read_text().splitlines() if path.exists() else []
    return [json.loads(text) for text in texts]


@pytest.mark.timeout(6 * START_DEADLINE)
def test_all_parts_and_a_part_that_is_killed_continues(base: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "command.log"
    out.mkdir()
    (out / "base").symlink_to(base)
    command = Command(out, log)
    try:
        command.until(
            lambda: command.process.poll() is not None or len(lines(out / "rl" / "log.jsonl")) > 1
        )
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.process.wait() == -signal.SIGKILL, tail(log, 60)
        command.until(lambda: not members(command.process.pid))  # the server ends too
    finally:
        kill_group(command.process)
    assert not (out / "rl" / "result.json").exists()
    done = ("start", "untrained", "warm")
    before = {name: (out / name / "result.json").stat().st_mtime_ns for name in done}
    command = Command(out, log)
    try:
        command.until(lambda: command.process.poll() is not None)
        assert command.process.returncode == 0, tail(log, 60)
    finally:
        kill_group(command.process)
    assert before == {name: (out / name / "result.json").stat().st_mtime_ns for name in done}
    results = {name: json.loads((out / name / "result.json").read_text()) for name in ENDS}
    names = list(ENDS)
    for at, name in enumerate(names[1:], 1):
        found = results[name]
        assert (found["reward"], found["aborted"], found["delivered_share"]) == (0.0, 0, 1.0)
        assert found["logprobs"]["mean"] < 1e-5
        assert found["sampled_per_second"] > 0
        assert list(found["compared_with"]) == names[1 : min(at, 4)]
    for name in names[3:]:
        logged = lines(out / name / "log.jsonl")
        steps = [line["steps"] for line in logged]
        assert steps == sorted(steps)
        assert set(steps) == set(range(1, STEPS + 1))
        for line in logged:
            assert 0 < line["reward"] < 1
            assert line["samples"] > 0
            assert all(0 < norm < np.inf for norm in line["gradients"])
            assert line["logprobs"]["mean"] < 1e-5
    assert [line["steps"] for line in lines(out / "warm" / "log.jsonl")] == [1, 2]
