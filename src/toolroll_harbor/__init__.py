"""Plays one trial with Harbor. `toolroll.environments.programs` runs this file in a sandbox, with
the Python interpreter in which Harbor is installed. It imports nothing of toolroll.

The argument is JSON: `task` (the task's folder), `agent`, `model`, `environment`, `timeout`, `args`
and `variables` (the agent's). The outcome is written to `OUTCOME`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from harbor.agents.installed.base import NonZeroAgentExitCodeError
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.llms.base import ContextLengthExceededError, OutputLengthExceededError
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial
from openai import APIError

TRIALS = Path("/tmp/.harbor")
OUTCOME = TRIALS / "outcome.json"
_HIDE = 'for each in "$1" "$2"; do mount -t tmpfs -o ro,size=4k hidden "$each"; done; shift 2; '
_HIDDEN = f'{_HIDE}cd "$1" && exec bash -c "$2"'


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc]
    """The sandbox in which this process runs. Its commands do not see the task's folder and the
    trial's.
    """

    @staticmethod
    def type() -> str:
        return "toolroll"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        """Do nothing, because the task's image is not used."""

    async def start(self, force_build: bool) -> None:  # noqa: FBT001 - Harbor's signature
        """Copy the files of the environment's folder to the working folder."""
        self._folder = self.task_env_config.workdir or "/app"
        if self.environment_dir.is_dir():
            await self.upload_dir(self.environment_dir, self._folder)

    async def stop(self, delete: bool) -> None:  # noqa: FBT001
        """Do nothing, because the sandbox ends with this process."""

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, target_dir, symlinks=True, dirs_exist_ok=True)

    download_file, download_dir = upload_file, upload_dir  # the files are this machine's

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run `command` with bash. `user` has no effect."""
        hidden = str(self.environment_dir.parent), str(TRIALS)
        words = ("unshare", "--mount", "bash", "-c", _HIDDEN, "bash", *hidden)
        variables = {name: os.environ[name] for name in ("HOME", "PATH")}
        # files, because a process that the command leaves behind keeps a pipe open
        with TemporaryFile() as output, TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *words,
                *(cwd or self._folder, command),
                env=variables | (self._merge_env(env) or {}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(timeout_sec):
                    status = await process.wait()
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, 9)
                    await process.wait()
            output.seek(0)
            errors.seek(0)
            return ExecResult(
                stdout=output.read().decode(errors="replace"),
                stderr=errors.read().decode(errors="replace"),
                return_code=status,
            )


def _graded(run: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return `run`, the method of an agent. If the agent's requests to the model fail, such as at
    the limit of turns, it ends as a failed command does. Harbor grades no other failure.
    """

    @wraps(run)
    async def run_graded(**arguments: Any) -> None:
        try:
            await run(**arguments)
        except (APIError, ContextLengthExceededError, OutputLengthExceededError) as error:
            raise NonZeroAgentExitCodeError(f"{type(error).__name__}: {error}") from error

    return run_graded


async def _installed(environment: BaseEnvironment) -> None:
    """Install nothing. A local sandbox sees the agents that are installed on this machine."""


async def main(arguments: dict[str, Any]) -> None:
    """Play the trial, and write its outcome."""
    local = arguments["environment"] == "local"
    config = TrialConfig(
        task=TaskConfig(path=Path(arguments["task"])),
        trial_name="trial",
        trials_dir=TRIALS,
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
    )
    trial = await Trial.create(config)
    if local:
        trial.agent.install = _installed
    trial.agent.run = _graded(trial.agent.run)
    result = await trial.run()
    failure, graded = result.exception_info, result.verifier_result
    outcome = {
        # also after an error of the agent: the caller knows whether the model failed
        "rewards": graded.rewards if graded is not None else None,
        "exception": failure.exception_type if failure is not None else None,
        "message": failure.exception_message if failure is not None else None,
    }
    OUTCOME.write_text(json.dumps(outcome))
    sys.stdout.write(f"{outcome['exception']}: {outcome['message']}\n" if failure else "")


if __name__ == "__main__":
    sys.modules["toolroll_harbor"] = sys.modules["__main__"]
    asyncio.run(main(json.loads(sys.argv[1])))
