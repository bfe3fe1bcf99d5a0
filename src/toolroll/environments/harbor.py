"""`harbor`: the task folders of a Harbor dataset, played in a local sandbox.

A task is a folder with `task.toml`, `instruction.md`, `environment/`, `solution/` and `tests/`. The
reward is what `tests/test.sh` writes to `/logs/verifier`.

Invariants: the model cannot see the dataset's folder. Unless the task asks for `shared`, its tests
run in a fresh sandbox, which gets only the model's files. Over untouched files they must give a
reward. So if they give none after the model has worked, the reward is 0.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from os.path import expandvars
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, Literal
from weakref import WeakKeyDictionary

import orjson

from toolroll.agents.environments.factory import openai_tool
from toolroll.agents.loop.call_policy import tool_message
from toolroll.environments.programs.sandbox import Network, Sandbox
from toolroll.environments.programs.visible import locked_folders
from toolroll.environments.sandboxed import SandboxEnvironment
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, Observation, StepResult, Task
from toolroll.rollout.errors import ActionError, EnvironmentFailure, UsageError
from toolroll.rollout.runs.environment_class import SPLIT
from toolroll.rollout.runtime.jsonable import finite

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
CHECKS = 8
"""How many tasks are checked at once."""
Phase = Literal["agent", "verifier"]
_LOGS = "/logs/verifier"
_COMMAND_LIMIT = 120.0
"""The time limit of one call of `bash`, in seconds."""
_OTHER_BACK_END = (
    "play it with another back end of Harbor (harbor_environment: docker, podman, daytona, e2b or "
    "modal)"
)
_PLAIN = re.compile(r"\s*(#.*|(FROM|WORKDIR)\s.*)?", re.IGNORECASE)
"""A line of a Dockerfile that changes nothing in the image."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Checks:
    """Of each task of a loop: the check of its tests. At most `limit` run at once."""

    begun: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CHECKS))


_CHECKS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Checks] = WeakKeyDictionary()


class HarborTask(SandboxEnvironment):
    """The task folders of a Harbor dataset.

    The model has the tool `bash`. A reply without a call ends the trial.

    Args:
        path: The folder of the dataset, or of one task.
        disk: The limit of the files of each folder that a trial can write, in bytes.
        memory: The limit of the data of each process, in bytes.
        processes: The limit of processes.
        folders: Folders that the sandbox sees too, besides those of PATH.
        image: What to do with a task that needs an image: refuse, or ignore the image.
        network: What a trial reaches besides the model: nothing (none), or all that this machine
            does (host).
    """

    def __init__(
        self,
        path: str = ".",
        disk: int = 2**30,
        memory: int | None = None,
        processes: int = 1024,
        folders: Sequence[str] = (),
        image: Literal["refuse", "ignore"] = "refuse",
        network: Network = "none",
    ) -> None:
        self._limits: dict[str, Any] = {"disk": disk, "memory": memory, "processes": processes}
        self._folders = folders
        self._dataset = Path(path).absolute()
        self._image = image
        self._network: Network = network
        self.rewards: dict[str, float] = {}

    @staticmethod
    def tasks(path: str = ".") -> list[Task]:
        """Return the folders in `path` that have a `task.toml`, or `path` itself."""
        parent = Path(path)
        if not parent.is_dir():
            raise UsageError(f"path (--env-args): there is no folder {path}")
        candidates = [parent, *sorted(parent.iterdir())]
        folders = [folder for folder in candidates if (folder / "task.toml").is_file()]
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
        command = _text(solution / "solve.sh")
        return [Action("", (ToolCall("bash", {"command": command}, ""),)), Action("Done.")]

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the sandbox, with the files of `environment/` in its working folder."""
        self.check_task(task)
        await self.check_tests()
        self.sandbox = self.new_sandbox("agent")
        await self.sandbox.start()
        await self.sandbox.upload(self.task_folder / "environment", self.folder)
        return Observation([{"role": "user", "content": self.instruction}], [BASH])

    def check_task(self, task: Task) -> None:
        """Read `task`. Raise `UsageError` if it cannot be played without Harbor."""
        self.read(task)
        self.check_local()
        if self.config.get("steps"):
            raise UsageError(f"{task.id} has several steps: play it with Harbor (harbor_agent)")

    def read(self, task: Task) -> None:
        """Read `task`."""
        self.task_folder = folder_of(task)
        try:
            self.config = tomllib.loads(_text(self.task_folder / "task.toml"))
            self.instruction = _text(self.task_folder / "instruction.md")
        except (OSError, ValueError) as error:
            raise UsageError(f"the task {self.task_folder} cannot be read: {error}") from error
        self.folder = self._section("environment").get("workdir") or "/app"
        self.timeout = self._section("agent").get("timeout_sec")
        self.grading_timeout = float(self._section("verifier").get("timeout_sec", 600.0))
        self.shared = self._section("verifier").get("environment_mode") == "shared"

    def _section(self, name: str) -> dict[str, Any]:
        section: dict[str, Any] = self.config.get(name, {})
        return section

    def check_local(self) -> None:
        """Raise `UsageError` if a local sandbox cannot be as the task says."""
        self._check_image()
        folders = [self.task_folder / name for name in ("environment", "tests")]
        wrong = [f"{folder} is a link: copy its files" for folder in folders if folder.is_symlink()]
        wrong += [
            f"a step has a network_mode: {_OTHER_BACK_END}"
            for step in self.config.get("steps", [])
            if any("network_mode" in step.get(phase, {}) for phase in ("agent", "verifier"))
        ]
        if self._network_of("agent") != self._network_of("verifier") and self.shared:
            wrong.append(f"its agent and its shared tests have two networks: {_OTHER_BACK_END}")
        if wrong:
            raise UsageError(f"{self.task_folder} cannot be played as it says: {wrong[0]}")

    def _network_of(self, phase: Phase) -> Network:
        """Return the network of `phase`. Raise `UsageError` if it cannot be as the task says."""
        section = self._section(phase)
        environment = section.get("environment") or self._section("environment")
        mode = section.get("network_mode") or environment.get("network_mode")
        if mode is None and environment.get("allow_internet") is False:  # its name in old tasks
            mode = "no-network"
        if mode == "no-network":
            return "none"
        if mode is None or (mode == "public" and self._network == "host"):
            return self._network
        advice = "play it with network=host" if mode == "public" else _OTHER_BACK_END
        problem = f"its {phase} has network_mode {mode!r}: {advice}"
        raise UsageError(f"{self.task_folder} cannot be played as it says: {problem}")

    def options(self, phase: Phase) -> dict[str, Any]:
        """Return the arguments of the `Sandbox` for `phase`."""
        linked = [path for path in self._dataset.glob("*") if path.is_symlink()]  # tasks elsewhere
        hidden = map(str, (self._dataset, self.task_folder, *linked, *self.hidden))
        return {
            "folders": list(map(str, self._folders)),
            # Harbor's process, which makes a sandbox too, has locked no folder
            "hidden": [*hidden, *locked_folders()],
            "own": [self.folder, *self._folders_of_artifacts()],
            "network": self._network_of(phase),
            **self._limits,
        }

    def new_sandbox(self, phase: Phase) -> Sandbox:
        """Return a sandbox for `phase`."""
        options = self.options(phase)
        return Sandbox(options.pop("folders"), options.pop("hidden"), **options)

    @property
    def artifacts(self) -> list[str]:
        """The paths that the tests get besides the working folder."""
        listed = self.config.get("artifacts", [])
        sources = [entry["source"] if isinstance(entry, dict) else entry for entry in listed]
        return [*sources, "/logs/artifacts"]

    def _folders_of_artifacts(self) -> list[str]:
        """Return the folders that a model can write besides the working folder: the artifacts, or
        where they are if their names look like those of files.
        """
        places = [PurePosixPath(path) for path in self.artifacts]
        folders = [path.parent if path.suffix else path for path in places]
        return [str(folder) for folder in folders if not folder.is_relative_to(self.folder)]

    async def check_tests(self) -> None:
        """Raise `UsageError` if the tests give no reward for untouched files."""
        checks = _CHECKS.setdefault(asyncio.get_running_loop(), _Checks())
        key = f"{self.task_folder} {_digest(self.task_folder)} {self.options('verifier')}"
        if key not in checks.begun or checks.begun[key].cancelled():
            checks.begun[key] = asyncio.ensure_future(self._check_tests(checks.limit))
        try:
            await asyncio.shield(checks.begun[key])
        except EnvironmentFailure:  # of this machine: the next trial checks again
            checks.begun.pop(key, None)
            raise

    async def _check_tests(self, limit: asyncio.Semaphore) -> None:
        if "environment_mode" not in self._section("verifier"):
            _say_separate(str(self._dataset))
        async with limit, self.new_sandbox("verifier") as sandbox:
            await sandbox.upload(self.task_folder / "environment", self.folder)
            _, reason = await self._test(sandbox)
        if reason is not None:
            raise UsageError(f"{self.task_folder} is broken: for untouched files, {reason}")

    async def step(self, action: Action) -> StepResult:
        """Run the commands of `action`. If it has none, grade the trial."""
        if not action.tool_calls:
            return await self.grade()
        commands = [_command(call) for call in action.tool_calls]
        messages = []
        for call, command in zip(action.tool_calls, commands, strict=True):
            try:
                end = await self.sandbox.run(
                    command,
                    self._variables("environment"),
                    folder=self.folder,
                    time_limit=_COMMAND_LIMIT,
                )
            except EnvironmentFailure as error:  # the command ended it
                return self._graded({"reward": 0.0}, str(error))
            failed = "" if end.status == 0 else f"[exit status {end.status}]"
            messages.append(tool_message(call, f"{end.output}{failed}"))
        return StepResult(messages)

    async def grade(self, packed: IO[bytes] | None = None) -> StepResult:
        """Run the tests, and return the reward, with the reason if it is 0 for want of a better.

        `packed`: an archive of the model's files, by default those in the sandbox. What the model
        may have caused is graded. Only what it cannot cause is raised.
        """
        if self.shared and packed is None:
            try:
                return self._graded(*await self._test(self.sandbox))
            except EnvironmentFailure as error:
                return self._graded({"reward": 0.0}, str(error))
        with TemporaryFile() as file:
            try:
                complete = packed is not None or await self.sandbox.pack(self.kept, file)
            except EnvironmentFailure:
                complete = False
            if not complete:
                return self.without_files()
            fresh = self.new_sandbox("verifier")
            try:
                await _started(fresh)
                try:
                    await fresh.unpack(packed or file, within=self.kept)
                    return self._graded(*await self._test(fresh))
                except EnvironmentFailure as error:
                    return self._graded({"reward": 0.0}, str(error))
            finally:
                await fresh.close()

    def without_files(self) -> StepResult:
        """Return the reward of a model whose files cannot be graded."""
        return self._graded({"reward": 0.0}, "the files could not be read, or are too large")

    @property
    def kept(self) -> list[str]:
        """The paths of the model's files that the tests get."""
        return [self.folder, *self.artifacts]

    def _graded(self, rewards: dict[str, float], reason: str | None) -> StepResult:
        self.rewards = rewards
        info: dict[str, Any] = {"verifier": "shared: can be forged"} if self.shared else {}
        if reason is not None:
            info["no_reward"] = reason
        return StepResult(reward=the_reward(rewards), done=True, info=info)

    async def truncated_reward(self) -> float | None:
        """Grade the trial."""
        return (await self.grade()).reward

    def metrics(self) -> Mapping[str, float]:
        """Return the rewards by name."""
        return self.rewards

    async def _test(self, sandbox: Sandbox) -> tuple[dict[str, float], str | None]:
        """Run `tests/test.sh`, and return its rewards. If it gives none, return 0 and the reason.
        Raise `EnvironmentFailure` if the sandbox fails.
        """
        await sandbox.upload(self.task_folder / "tests", "/tests")
        end = await sandbox.run(
            f"rm -rf {_LOGS}/reward.*; chmod +x /tests/test.sh; /tests/test.sh",
            self._variables("environment", "verifier"),
            folder=self.folder,
            time_limit=self.grading_timeout,
        )
        if end.status is None:
            return {"reward": 0.0}, f"tests/test.sh took more than {self.grading_timeout:g} s"
        await sandbox.kill()
        for name in ("reward.json", "reward.txt"):
            content = await sandbox.read(f"{_LOGS}/{name}")
            if content is not None:
                try:
                    rewards = read_rewards(content, name)
                    the_reward(rewards)
                except EnvironmentFailure as error:
                    return {"reward": 0.0}, str(error)
                return rewards, None
        details = f"(exit status {end.status}): {end.output[-1000:]}"
        return {"reward": 0.0}, f"tests/test.sh wrote no reward {details}"

    def _variables(self, *sections: str) -> dict[str, str]:
        """Return the environment variables of the task, which may name those of this process."""
        return {
            name: expandvars(str(text))
            for section in sections
            for name, text in self.config.get(section, {}).get("env", {}).items()
        }

    def _check_image(self) -> None:
        """Raise `UsageError` if the task needs an image, which a local sandbox does not have."""
        dockerfile = self.task_folder / "environment" / "Dockerfile"
        lines = _text(dockerfile).splitlines() if dockerfile.is_file() else []
        needs = not all(map(_PLAIN.fullmatch, lines))
        needs |= bool(self._section("environment").get("docker_image"))
        needs |= (self.task_folder / "environment" / "docker-compose.yaml").exists()
        if needs and self._image == "refuse":
            raise UsageError(
                f"{self.task_folder} needs an image, which the local back end does not have: "
                f"{_OTHER_BACK_END}, or without the image (image=ignore)"
            )


async def _started(sandbox: Sandbox) -> None:
    """Start a further sandbox. The first one has shown that this machine can."""
    try:
        await sandbox.start()
    except UsageError as error:
        raise EnvironmentFailure(str(error)) from error


@cache
def _say_separate(dataset: str) -> None:
    logger.warning(
        "the tasks in %s do not say where their tests run (environment_mode): they run in a fresh "
        "sandbox (separate), with the working folder and the artifacts",
        dataset,
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


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


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
    if not numbers or not all(finite(number) is not None for number in numbers.values()):
        raise EnvironmentFailure(f"{name} must have finite numbers, not {content[:200]!r}")
    return numbers


def the_reward(rewards: Mapping[str, float]) -> float:
    """Return the reward named `reward`, or the only one."""
    if "reward" not in rewards and len(rewards) > 1:
        raise EnvironmentFailure(f"none of the rewards {', '.join(rewards)} is named `reward`")
    return rewards.get("reward", next(iter(rewards.values())))
