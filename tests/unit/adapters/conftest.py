"""Fixtures of the slime tests."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support import miles_mirror, slime_mirror, verl_mirror
from support.slime_trainer import Environments, real_slime

from toolroll.trainers.slime.training import close_rollout, generate_rollout


@pytest.fixture(params=["mirror", pytest.param("real", marks=pytest.mark.peers)])
def sample_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """slime's `Sample`: the mirror's, installed under slime's module names, or the real one."""
    if request.param == "mirror":
        slime_mirror.install(monkeypatch)
        return slime_mirror.Sample
    return real_slime("slime.utils.types").Sample


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types of miles and of verl, under the names of their modules."""
    miles_mirror.install(monkeypatch)
    verl_mirror.install(monkeypatch)


@pytest.fixture
def closing() -> Iterator[None]:
    """Close what `generate_rollout` leaves open for the next rollout."""
    yield
    close_rollout()


class Rollout:
    """`generate_rollout` in a thread without an event loop, as slime calls it."""

    def __init__(self, sample_type: Any) -> None:
        self.sample_type = sample_type

    def source(self, *prompts: Any, n: int) -> slime_mirror.DataSource:
        """Groups of `n` samples of each prompt (default: task 0)."""
        rows = [{"prompt": prompt} for prompt in prompts or (0,)]
        return slime_mirror.DataSource(self.sample_type, rows, n)

    async def __call__(self, args: Any, source: Any = None, number: int = 0, **options: Any) -> Any:
        return await asyncio.to_thread(generate_rollout, args, number, source, **options)


@pytest.fixture
def rollout(sample_type: Any, closing: None) -> Rollout:
    return Rollout(sample_type)


@pytest.fixture
def slime_state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The state of slime's own loop, which says whether it stops."""
    return slime_mirror.install_loop(monkeypatch)


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> Environments:
    return Environments(monkeypatch)


@pytest.fixture
def slime_loop() -> Iterator[Any]:
    """slime's own rollout loop; it is forgotten again, since `generate` asks it whether it
    stops.
    """
    real_slime("slime.utils.types")
    module = importlib.import_module("slime.rollout.sglang_rollout")
    yield module
    module.GenerateState._instances.clear()
    sys.modules.pop(module.__name__)
