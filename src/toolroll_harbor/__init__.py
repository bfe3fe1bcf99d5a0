"""Plays one trial with Harbor. `toolroll.environments.programs` runs this file with the Python
interpreter in which Harbor is installed. Of toolroll, it imports only `Sandbox`.

Standard input is JSON: `task` (the task's folder), `agent`, `model`, `environment`, `timeout`,
`args`, `variables` (the agent's), `trials` (a folder), `source` (where the package toolroll is),
`sandbox` (its arguments), `folder` (the working folder), `kept` (the paths of the agent's files),
`packed` (the descriptor that gets them, or null if Harbor grades), `port` (the model's), `ends`
(whether the end of the agent's only run ends the session) and `channel`: the descriptor of a
socket. It takes the model's socket in a sandbox, `end`, and the outcome. Each message is answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tarfile
from collections.abc import Awaitable, Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from harbor.agents.installed.base import NonZeroAgentExitCodeError
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.llms.base import ContextLengthExceededError, OutputLengthExceededError
from harbor.models.trial.config import (
    AgentConfig,
    EnvironmentConfig,
    TaskConfig,
    TrialConfig,
    VerifierConfig,
)
from harbor.trial.trial import Trial
from openai import APIError


class Channel:
    """The socket to toolroll, and the arguments that came from it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self._socket = socket.socket(fileno=arguments["channel"])
        sys.path.append(arguments["source"])  # the packages beside toolroll are not for Harbor
        self.sandbox = import_module("toolroll.environments.programs.sandbox")
        sys.path.remove(arguments["source"])
        self.packed = False

    def tell(self, message: bytes, *descriptors: int) -> None:
        """Send `message`, and wait for the answer."""
        socket.send_fds(self._socket, [message], descriptors)
        self._socket.recv(16)


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A sandbox of its own. If the agent's is stopped, its files are handed over."""

    channel: Channel

    @staticmethod
    def type() -> str:
        return "toolroll"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Do nothing, because the task's image is not used."""

    async def start(self, force_build: bool) -> None:  # noqa: FBT001 - Harbor's signature
        """Start the sandbox, with the files of the environment's folder in the working folder."""
        arguments = self.channel.arguments
        self._folder = arguments["folder"]
        options = dict(arguments["sandbox"])
        options["own"] = [*options["own"], "/installed-agent"]  # which some agents write
        self._sandbox = self.channel.sandbox.Sandbox(
            options.pop("folders"), options.pop("hidden"), **options
        )
        await self._sandbox.start()
        if self._sandbox.network == "none":
            with await self._sandbox.listen(arguments["port"]) as listener:
                self.channel.tell(b"listen", listener.fileno())
        if self.environment_dir.is_dir():
            await self.upload_dir(self.environment_dir, self._folder)

    async def stop(self, delete: bool) -> None:  # noqa: FBT001
        """End the sandbox."""
        arguments = self.channel.arguments
        if arguments["packed"] is not None and not self.channel.packed:
            with os.fdopen(arguments["packed"], "r+b", closefd=False) as file:
                self.channel.packed = await self._sandbox.pack(arguments["kept"], file)
        await self._sandbox.close()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = Path(target_path)
        with TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.add(source_path, arcname=target.name)
            await self._sandbox.unpack(file, str(target.parent))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._sandbox.upload(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._download(source_path, Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._download(source_dir, Path(target_dir))

    async def _download(self, source: str, target: Path) -> None:
        with TemporaryFile() as file, TemporaryDirectory() as folder:
            if not await self._sandbox.pack([source], file, kill=False):
                raise FileNotFoundError(source)
            file.seek(0)
            with tarfile.open(fileobj=file) as archive:
                archive.extractall(folder, filter="data")
            extracted = Path(folder) / source.strip("/")
            if extracted.is_dir():
                shutil.copytree(extracted, target, symlinks=True, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(extracted, target, follow_symlinks=False)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run `command` with bash. `user` has no effect."""
        errors = self._sandbox.new_output()
        async with asyncio.timeout(timeout_sec):  # it ends this command, and no other
            end = await self._sandbox.run(
                command, self._merge_env(env) or {}, folder=cwd or self._folder, errors=errors
            )
        stderr = errors.text().decode(errors="replace")
        return ExecResult(stdout=end.output, stderr=stderr, return_code=end.status)


def _graded(
    run: Callable[..., Awaitable[None]], ended: Callable[[], None]
) -> Callable[..., Awaitable[None]]:
    """Return `run`, the method of an agent, which calls `ended` at its end. If the agent's requests
    to the model fail, such as at the limit of turns, it ends as a failed command does. Harbor
    grades no other failure.
    """

    @wraps(run)
    async def run_graded(**arguments: Any) -> None:
        try:
            await run(**arguments)
        except (APIError, ContextLengthExceededError, OutputLengthExceededError) as error:
            raise NonZeroAgentExitCodeError(f"{type(error).__name__}: {error}") from error
        finally:
            ended()

    return run_graded


async def _installed(environment: BaseEnvironment) -> None:
    """Install nothing. A local sandbox sees the agents that are installed on this machine."""


async def main(channel: Channel) -> None:
    """Play the trial, and tell its outcome."""
    arguments = channel.arguments
    local = arguments["environment"] == "local"
    config = TrialConfig(
        task=TaskConfig(path=Path(arguments["task"])),
        trial_name="trial",
        trials_dir=Path(arguments["trials"]),
        agent=AgentConfig(
            name=arguments["agent"],
            model_name=arguments["model"],
            kwargs=arguments["args"],
            env=arguments["variables"],
            override_timeout_sec=arguments["timeout"],
        ),
        environment=EnvironmentConfig(import_path="toolroll_harbor:LocalEnvironment")
        if local
        else EnvironmentConfig(type=arguments["environment"]),
        verifier=VerifierConfig(disable=arguments["packed"] is not None),
    )
    LocalEnvironment.channel = channel
    trial = await Trial.create(config)
    if local:
        trial.agent.install = _installed
    trial.agent.run = _graded(
        trial.agent.run, lambda: channel.tell(b"end") if arguments["ends"] else None
    )
    result = await trial.run()
    failure, graded = result.exception_info, result.verifier_result
    outcome = {
        # also after an error of the agent: the caller knows whether the model failed
        "rewards": graded.rewards if graded is not None else None,
        "packed": channel.packed,
        "exception": failure.exception_type if failure is not None else None,
        "message": failure.exception_message[:4000] if failure is not None else None,
    }
    sys.stdout.write(f"{outcome['exception']}: {outcome['message']}\n" if failure else "")
    channel.tell(json.dumps(outcome).encode())


if __name__ == "__main__":
    sys.modules["toolroll_harbor"] = sys.modules["__main__"]
    asyncio.run(main(Channel(json.load(sys.stdin))))
