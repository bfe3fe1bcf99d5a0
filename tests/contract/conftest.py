"""What contract tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import slime_mirror
from support.slime_trainer import real_slime
from support.tau import BOTH, TauBench, needed

from toolroll.rollout.adapters.slime.training import close_rollout
from toolroll.rollout.testing import load_embedded_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded tokenizer."""
    return load_embedded_tokenizer()


@pytest.fixture(params=BOTH)
def tau(request: pytest.FixtureRequest) -> TauBench:
    """The small package, and the real one."""
    return needed(request.param)


@pytest.fixture(params=["mirror", pytest.param("real", marks=pytest.mark.peers)])
def sample_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """slime's `Sample`: the mirror's, with its modules in slime's place, or the real one."""
    if request.param == "mirror":
        slime_mirror.install(monkeypatch)
        return slime_mirror.Sample
    return real_slime("slime.utils.types").Sample


@pytest.fixture
def closing() -> Iterator[None]:
    """Closes what `generate_rollout` leaves open for the next rollout."""
    yield
    close_rollout()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The figures that passed tests noted with `record_property("figure", ...)`: what was counted stands under the dots."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
