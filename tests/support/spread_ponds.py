"""What the processes of a run open in tests: functions of a module, as they are pickled by name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from support.episodes import agent
from support.ponds import PondFactory

from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runner import Runner, RunSettings
from toolroll.rollout.served import ServedModel
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.testing import load_embedded_tokenizer
from toolroll.rollout.types import Action, StepResult, Task

PARAMS = {"temperature": 1.0, "max_new_tokens": 256}
SAMPLES = 3


async def open_ponds(url: str, count: int, share: int, stack: AsyncExitStack) -> tuple[Runner, Sequence[Task]]:
    """Ponds, played against the engine at `url`."""
    return await _open(PondFactory(count), url, share, stack)


async def open_with_odd_info(url: str, count: int, share: int, stack: AsyncExitStack) -> tuple[Runner, Sequence[Task]]:
    """Their `info` holds what cannot be sent from one process to another."""
    return await _open(_OddFactory(count), url, share, stack)


async def open_and_refuse(share: int, stack: AsyncExitStack) -> tuple[Runner, Sequence[Task]]:
    """The settings are wrong."""
    raise UsageError("there is no such model")


async def open_and_fail(share: int, stack: AsyncExitStack) -> tuple[Runner, Sequence[Task]]:
    """There is a mistake in it."""
    raise KeyError("model")


class _OddFactory(PondFactory):
    def make(self, options: Any) -> Any:
        pond = super().make(options)
        step = pond.step

        def odd(action: Action) -> StepResult:
            found = step(action)
            return (
                StepResult(found.messages, found.reward, found.done, info={"lock": threading.Lock(), "looks": 7})
                if found.done
                else found
            )

        pond.step = odd  # type: ignore[method-assign]
        return pond


async def _open(factory: PondFactory, url: str, share: int, stack: AsyncExitStack) -> tuple[Runner, Sequence[Task]]:
    tokenizer = load_embedded_tokenizer()
    template = ChatTemplate(tokenizer)
    client = Engine(EngineConfig(url=url, vocab_size=len(tokenizer)))
    served = ServedModel(client, template, get_parser("hermes", template.encoder.control))
    await stack.enter_async_context(served)
    settings = RunSettings(PARAMS, samples=SAMPLES, concurrency=share)
    return Runner(factory, lambda: agent(served, verify="sample"), settings), factory.tasks("test")
