"""What contract tests share."""

from __future__ import annotations

from typing import Any

import pytest

from toolroll.rollout.testing import load_embedded_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded tokenizer."""
    return load_embedded_tokenizer()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The figures that passed tests noted with `record_property("figure", ...)`: what was counted stands under the dots."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
