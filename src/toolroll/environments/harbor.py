"""`harbor`: the task folders of a Harbor dataset, played in a local sandbox.

A task is a folder with `task.toml`, `instruction.md`, `environment/`, `solution/` and `tests/`. The
reward is what `tests/test.sh` writes to `/logs/verifier`.

Invariants: the model cannot see the dataset's folder. A missing reward, or one that is not a finite
number, is a failure of the environment, and never a reward of 0.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from os.path import expandvars
from pathlib import Path
from typing import Any, Literal

import orjson

from toolroll.agents.environments.factory import openai_tool
from toolroll.agents.loop.call_policy import tool_message
from toolroll.environments.programs.sandbox import Sandbox
from toolroll.environments.sandboxed import SandboxEnvironment
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError, EnvironmentFailure, UsageError
from toolroll.rollout.runs.environment_class import SPLIT
from toolroll.rollout.types import Action, Observation, StepResult, Task

BASH = openai_tool(
    "bash",
    "Run a command with bash, and return its output.",
    {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
)
_COMMAND_LIMIT = 120.0
"""The time limit of one call of `bash`, in seconds."""
_PLAIN = re.compile(r"\s*(#.*|(FROM|WORKDIR)\s.*)?", re.IGNORECASE)
"""A line of a Dockerfile that changes nothing in the image."""


class HarborTask(SandboxEnvironment):
    """The task folders of a Harbor dataset.

    The model has the tool `bash`. A reply without a call ends the trial.

    Args:
        path: The folder of the dataset, or of one task.
        disk: The limit of all files of a trial, in bytes.
        memory: The limit of the data of each process, in bytes.
        processes: The limit of processes. It has no effect for root.
        folders: Folders below /tmp or /home that the sandbox sees too, besides those of PATH.
        image: What to do with a task that needs an image: refuse, or ignore the image.
    """

    def __init__(
        self,
        path: str = ".",
        disk: int = 2**30,
        memory: int | None = None,
        processes: int = 1024,
        folders: Sequence[str] = (),
        image: Literal["refuse", "ignore"] = "refuse",
    ) -> None:
        self._limits: dict[str, Any] = {"disk": disk, "memory": memory, "processes": processes}
        self._folders = folders
        self._dataset = Path(path).absolute()
        self._image = image
        self.rewards: dict[str, float] = {}

    @staticmethod
    def tasks(path: str = ".") -> list[Task]:
        """Return the folders in `path` that have a `task.toml`, or `path` itself."""
        parent = Path(path)
        found = [parent, *sorted(parent.iterdir())] if parent.is_dir() else []
        folders = [folder for folder in found if (folder / "task.toml").is_file()]
        return [
            Task(_name(folder), index, SPLIT, {"folder": str(folder), "content": _digest(folder)})
            for index, folder in enumerate(folders)
        ]

    @staticmethod
    def reference(task: Task) -> Sequence[Action] | None:
        """Return `solution/solve.sh` as one command, or None if the solution has other files."""
        solution = folder_of(task) / "solution"
        if [path.name for path in solution.glob("*")] != ["solve.sh"]:
            return None
        command = (solution / "solve.sh").read_text(encoding="utf-8")
        return [Action("", (ToolCall("bash", {"command": command}, ""),)), Action("Done.")]

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the sandbox, with the files of `environment/` in its working folder."""
        self.check_image(task)
        await self.start(task, hidden=[self._dataset])
        if self.config.get("steps"):
            raise UsageError(f"{task.id} has several steps: play it with Harbor (harbor_agent)")
        await self.sandbox.upload(self.task_folder / "environment", self.folder)
        return Observation([{"role": "user", "content": self.instruction}], [BASH])

    async def start(
        self, task: Task, *, folders: Sequence[Path] = (), hidden: Sequence[Path] = ()
    ) -> None:
        """Read `task`, and start its sandbox, which also sees `folders`, and in which the folders
        `hidden` are empty.
        """
        self.task_folder, self.config = _read(task)
        self.instruction = (self.task_folder / "instruction.md").read_text(encoding="utf-8")
        self.folder = self.config.get("environment", {}).get("workdir") or "/app"
        self.timeout = self.config.get("agent", {}).get("timeout_sec")
        self.grading_timeout = float(self.config.get("verifier", {}).get("timeout_sec", 600.0))
        self.sandbox = Sandbox([*self._folders, *folders], hidden, **self._limits)
        await self.sandbox.start()

    async def step(self, action: Action) -> StepResult:
        """Run the commands of `action`. If it has none, grade the trial."""
        if not action.tool_calls:
            return StepResult(reward=await self._grade(), done=True)
        commands = [_command(call) for call in action.tool_calls]
        messages = []
        for call, command in zip(action.tool_calls, commands, strict=True):
            end = await self.sandbox.run(
                command,
                self._variables("environment"),
                folder=self.folder,
                time_limit=_COMMAND_LIMIT,
            )
            failed = "" if end.status == 0 else f"[exit status {end.status}]"
            messages.append(tool_message(call, f"{end.output}{failed}"))
        return StepResult(messages)

    async def truncated_reward(self) -> float | None:
        """Grade the trial."""
        return await self._grade()

    def metrics(self) -> Mapping[str, float]:
        """Return the rewards by name."""
        return self.rewards

    async def _grade(self) -> float:
        """Run `tests/test.sh`, and return the reward that it writes."""
        await self.sandbox.upload(self.task_folder / "tests", "/tests")
        end = await self.sandbox.run(
            "rm -f /logs/verifier/reward.*; chmod +x /tests/test.sh; /tests/test.sh",
            self._variables("environment", "verifier"),
            folder=self.folder,
            time_limit=self.grading_timeout,
        )
        if end.status is None:
            raise EnvironmentFailure(f"tests/test.sh took more than {self.grading_timeout:g} s")
        for name in ("reward.json", "reward.txt"):
            content = await self.sandbox.read(f"/logs/verifier/{name}")
            if content is not None:
                self.rewards = read_rewards(content, name)
                return the_reward(self.rewards)
        raise EnvironmentFailure(
            f"tests/test.sh wrote no reward (exit status {end.status}): {end.output[-1000:]}"
        )

    def _variables(self, *sections: str) -> dict[str, str]:
        """Return the environment variables of the task, which may name those of this process."""
        return {
            name: expandvars(str(text))
            for section in sections
            for name, text in self.config.get(section, {}).get("env", {}).items()
        }

    def check_image(self, task: Task) -> None:
        """Raise `UsageError` if `task` needs an image, which a local sandbox does not have."""
        folder, config = _read(task)
        dockerfile = folder / "environment" / "Dockerfile"
        lines = dockerfile.read_text(encoding="utf-8").splitlines() if dockerfile.is_file() else []
        needs = not all(map(_PLAIN.fullmatch, lines))
        needs |= bool(config.get("environment", {}).get("docker_image"))
        needs |= (folder / "environment" / "docker-compose.yaml").exists()
        if needs and self._image == "refuse":
            raise UsageError(
                f"{folder} needs an image, which the local back end does not have: play it with "
                "Harbor (harbor_environment), or without the image (image=ignore)"
            )


def folder_of(task: Task) -> Path:
    """Return the absolute path of the folder of `task`."""
    return Path(str(task.data["folder"])).absolute()


def _name(folder: Path) -> str:
    return (folder if folder.name.strip(".") else folder.resolve()).name


def _digest(folder: Path) -> str:
    """Return a hash of the names and the contents of the files in `folder`."""
    digest = blake2b(digest_size=16)
    for file in sorted(filter(Path.is_file, folder.rglob("*"))):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _command(call: ToolCall) -> str:
    command = (call.arguments or {}).get("command")
    if call.name != "bash" or not isinstance(command, str):
        raise ActionError("the only tool is bash, with the argument command, a text")
    return command


def _read(task: Task) -> tuple[Path, dict[str, Any]]:
    """Return the folder of `task`, and the content of its `task.toml`."""
    folder = folder_of(task)
    try:
        return folder, tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / 'task.toml'} cannot be read: {error}") from error


def read_rewards(content: bytes, name: str) -> dict[str, float]:
    """Return the rewards in a file of the verifier. `reward.json` has a number, or numbers by name.

    Raise `EnvironmentFailure` if one of them is not a finite number.
    """
    try:
        loaded = orjson.loads(content) if name.endswith(".json") else float(content)
        rewards = loaded if isinstance(loaded, dict) else {"reward": loaded}
        numbers = {str(key): float(reward) for key, reward in rewards.items()}
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(f"{name} has no numbers: {content[:200]!r}") from error
    if not numbers or not all(map(math.isfinite, numbers.values())):
        raise EnvironmentFailure(f"{name} must have finite numbers, not {content[:200]!r}")
    return numbers


def the_reward(rewards: Mapping[str, float]) -> float:
    """Return the reward named `reward`, or the only one."""
    if "reward" not in rewards and len(rewards) > 1:
        raise EnvironmentFailure(f"none of the rewards {', '.join(rewards)} is named `reward`")
    return rewards.get("reward", next(iter(rewards.values())))
