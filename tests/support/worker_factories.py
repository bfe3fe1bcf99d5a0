"""What the processes of a run open in tests. It is pickled by name, so module-level."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from support.episodes import agent, opened_model
from support.toy_environment import PondFactory

from toolroll.rollout.environment import Action, StepResult, Task
from toolroll.rollout.errors import RolloutError
from toolroll.rollout.runs.runner import Runner, RunStoppedError
from toolroll.rollout.settings import RunSettings
from toolroll.testing import load_embedded_tokenizer

PARAMS = {"temperature": 1.0, "max_new_tokens": 256}
SAMPLES = 3
Opened = tuple[Runner, Sequence[Task]]


async def open_ponds(url: str, count: int, share: int, stack: AsyncExitStack) -> Opened:
    """Ponds, played against the engine at `url`."""
    return await _open(PondFactory(count), url, share, stack)


async def open_with_odd_info(url: str, count: int, share: int, stack: AsyncExitStack) -> Opened:
    """Their `info` holds what cannot be pickled, and what cannot be unpickled."""
    return await _open(_ChangedFactory(count, _odd), url, share, stack)


async def open_and_suffer(
    url: str, count: int, mark: Path, what: str, share: int, stack: AsyncExitStack
) -> Opened:
    """The first step of all does what `what` names. It writes a process id to `mark`."""
    troubled = partial(_troubled, mark, TROUBLES[what])
    return await _open(_ChangedFactory(count, troubled), url, share, stack)


async def open_and_raise(error: BaseException, share: int, stack: AsyncExitStack) -> Opened:
    """It raises `error`."""
    raise error


async def open_and_raise_a_lock(share: int, stack: AsyncExitStack) -> Opened:
    """It raises an error that cannot be sent."""
    error = RolloutError("it holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


async def open_and_stop(share: int, stack: AsyncExitStack) -> Opened:
    """The run cannot continue, for a reason that cannot be sent."""
    raise RunStoppedError("ten failed in a row", {"reason": threading.Lock()})


def _stop(mark: Path) -> None:
    """Stop the process, as a debugger does."""
    mark.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def _fork_and_die(mark: Path) -> None:
    """Fork a process that has all open files, and die."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    mark.write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


TROUBLES = {"stop": _stop, "fork and die": _fork_and_die}
Step = Callable[[Action], StepResult]


class Needy(Exception):
    """Cannot be made anew from its arguments, as errors of some clients."""

    def __init__(self, message: str, *, request: str) -> None:
        super().__init__(message)
        self.request = request


def _odd(step: Step, action: Action) -> StepResult:
    found = step(action)
    info = {"lock": threading.Lock(), "error": Needy("no", request="r"), "looks": 7}
    return replace(found, info=info) if found.done else found


def _troubled(mark: Path, trouble: Any, step: Step, action: Action) -> StepResult:
    with contextlib.suppress(FileExistsError):
        mark.touch(exist_ok=False)
        trouble(mark)
    return step(action)


class _ChangedFactory(PondFactory):
    """Ponds with another way to `step`."""

    def __init__(self, count: int, change: Callable[[Step, Action], StepResult]) -> None:
        super().__init__(count)
        self._change = change

    def make(self, options: Any) -> Any:
        pond: Any = super().make(options)
        pond.step = partial(self._change, pond.step)
        return pond


async def _open(factory: PondFactory, url: str, share: int, stack: AsyncExitStack) -> Opened:
    model = opened_model(url, load_embedded_tokenizer())
    served = await stack.enter_async_context(model)
    settings = RunSettings(sampling_params=PARAMS, samples=SAMPLES, concurrency=share)
    return Runner(factory, lambda: agent(served, verify="sample"), settings), factory.tasks("test")
