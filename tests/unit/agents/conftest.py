"""Fixtures of the benchmark tests."""

from __future__ import annotations

import pytest
from support.tau import BOTH, TauBench, needed


@pytest.fixture(params=BOTH)
def tau(request: pytest.FixtureRequest) -> TauBench:
    """The small tau-bench package of the tests, and the real one."""
    return needed(request.param)
