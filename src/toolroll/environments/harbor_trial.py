"""`HarborTrial`: a task whose agent Harbor runs, in an interpreter of its own.

With the back end `local`, Harbor runs outside the sandbox, which its `LocalEnvironment` makes for
the agent. Harbor hands over the agent's files, and the environment `harbor` grades them. Harbor
grades itself with its other back ends, if the task asks for `shared`, and if it has several steps.

Invariant: nothing of Harbor is left, even if this process is killed. Its files are in memory, in a
mount namespace that ends with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from toolroll.environments.harbor import HarborTask, read_rewards, the_reward
from toolroll.environments.programs import sandbox
from toolroll.environments.programs.output import Exit, Output
from toolroll.environments.programs.program_settings import ProgramSettings
from toolroll.environments.programs.visible import find
from toolroll.environments.sandboxed import SandboxEnvironment, Session
from toolroll.rollout.environment import Action, Environment, Observation, StepResult, Task
from toolroll.rollout.errors import EnvironmentFailure, UsageError

_FOLDER = "/dev/shm"
"""In memory, and Harbor's own."""
_PREPARING = 1800.0
"""Seconds for building and installing, besides the time limits of the agent and the verifier."""
_MESSAGE = 2**16


class HarborTrial(SandboxEnvironment):
    """One trial of the task that `env` reads. `model` is the model's name."""

    def __init__(self, env: Environment, back_end: str, model: str) -> None:
        if not isinstance(env, HarborTask):
            raise UsageError(f"Harbor cannot play {type(env).__name__}: use the environment harbor")
        self._env = env
        self._back_end = back_end
        self._model = model
        self._process: asyncio.subprocess.Process | None = None
        self._outcome: dict[str, Any] | None = None
        self._files = ExitStack()
        self._packed: IO[bytes]
        spec = find_spec("toolroll_harbor")
        assert spec is not None
        self._script = str(spec.origin)

    def check_task(self, task: Task) -> None:
        """Read `task`. Raise `UsageError` if Harbor's back end cannot play it."""
        self._env.read(task)
        if self._back_end == "local":
            self._env.check_local()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Read and check the task."""
        env = self._env
        env.hidden = self.hidden
        self.check_task(task)
        local = self._back_end == "local"
        self._graded_here = local and not env.shared and not env.config.get("steps")
        if self._graded_here:
            await env.check_tests()
        self._packed = self._files.enter_context(TemporaryFile())  # noqa: SIM115
        self.timeout = env.timeout
        return Observation([{"role": "user", "content": env.instruction}])

    def time_limit(self, settings: ProgramSettings) -> float:
        """Return Harbor's time limit. Harbor limits its agent itself."""
        return super().time_limit(settings) + self._env.grading_timeout + _PREPARING

    async def play(
        self, settings: ProgramSettings, variables: Mapping[str, str], session: Session
    ) -> Exit:
        """Run Harbor to its end."""
        path = os.environ.get("PATH", os.defpath)
        base_variables = {"HOME": _FOLDER, "PATH": path, "TMPDIR": _FOLDER}
        output = Output()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            argv = [
                find("bwrap", "bubblewrap"),
                "--dev-bind",
                "/",
                "/",
                "--tmpfs",
                _FOLDER,
            ]
            argv += ["--die-with-parent", "--new-session", "--chdir", _FOLDER, "--"]
            argv += [settings.harbor_python, self._script, "-"]
            self._process = process = await asyncio.create_subprocess_exec(
                *argv,
                env={**base_variables, **variables},
                stdin=asyncio.subprocess.PIPE,
                stdout=output.file,
                stderr=output.file,
                pass_fds=[theirs.fileno(), self._packed.fileno()],
            )
            os.close(output.file)
            theirs_number = theirs.fileno()
            arguments = self._arguments(settings, session) | {"channel": theirs_number}
            assert process.stdin is not None
            process.stdin.write(json.dumps(arguments).encode())
            process.stdin.close()
            theirs.close()
            status: int | None = None
            async with AsyncExitStack() as stack:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.time_limit(settings)):
                        await self._listen(ours, session, stack)
                        status = await process.wait()
                await self.stop()
        text = output.text().decode(errors="replace")
        output.close()
        return Exit(status, text)

    def _arguments(self, settings: ProgramSettings, session: Session) -> dict[str, Any]:
        provider = "anthropic" if settings.harbor_agent == "claude-code" else "openai"
        return {
            "task": str(self._env.task_folder),
            "agent": settings.harbor_agent,
            "model": f"{provider}/{self._model}",
            "environment": self._back_end,
            "timeout": settings.timeout,
            "args": settings.harbor_args,
            "variables": settings.variables,
            "trials": _FOLDER,
            "source": str(Path(sandbox.__file__).parents[3]),
            "sandbox": self._env.options("agent") if self._back_end == "local" else None,
            "folder": self._env.folder,
            "kept": self._env.kept,
            "packed": self._packed.fileno() if self._graded_here else None,
            "port": session.server.port,
            "ends": not self._env.config.get("steps"),
        }

    async def _listen(
        self, channel: socket.socket, session: Session, stack: AsyncExitStack
    ) -> None:
        """Do what Harbor's process asks for, until it ends."""
        loop = asyncio.get_running_loop()
        channel.setblocking(False)
        readable = asyncio.Event()
        loop.add_reader(channel, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                try:
                    message, descriptors, flags, _ = socket.recv_fds(channel, _MESSAGE, 1)
                except BlockingIOError:
                    continue
                if not message:
                    return
                if descriptors:  # the endpoint's address in a sandbox
                    listener = socket.socket(fileno=descriptors[0])
                    await stack.enter_async_context(session.server.listening(listener))
                elif message == b"end":
                    await session.end()
                elif not flags & socket.MSG_TRUNC:  # such as of more rewards than fit
                    self._outcome = json.loads(message)
                with suppress(BrokenPipeError):  # Harbor may have ended
                    channel.send(b"done")
        finally:
            loop.remove_reader(channel)

    async def step(self, action: Action) -> StepResult:
        """Return the reward of the agent's files, or that of Harbor's verifier."""
        outcome = self._outcome or {}
        info = {"harbor_exception": outcome["exception"]} if outcome.get("exception") else {}
        if self._graded_here:
            packed = bool(outcome.get("packed"))
            graded = await self._env.grade(self._packed) if packed else self._env.without_files()
            return StepResult(reward=graded.reward, done=True, info={**graded.info, **info})
        try:
            rewards = read_rewards(json.dumps(outcome.get("rewards")).encode(), "reward.json")
            the_reward(rewards)
        except EnvironmentFailure as error:
            if self._back_end != "local":
                raise EnvironmentFailure(f"Harbor ended without a reward: {outcome}") from error
            rewards, info["no_reward"] = {"reward": 0.0}, str(error)
        self._env.rewards = rewards
        if self._back_end == "local":
            info["verifier"] = "shared: can be forged"
        return StepResult(reward=the_reward(rewards), done=True, info=info)

    def metrics(self) -> Mapping[str, float]:
        """Return the rewards by name."""
        return self._env.rewards

    async def stop(self) -> None:
        """End Harbor, and with it its sandboxes."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self) -> None:
        """End Harbor, and forget the agent's files."""
        await self.stop()
        self._files.close()
