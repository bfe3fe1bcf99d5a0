"""What every test runs under."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from toolroll.rollout.testing import load_embedded_tokenizer

ALLOWED = "TOOLROLL_TEST_DATA"
"""A skip that names this variable is allowed everywhere: the extra data are in no package."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under TOOLROLL_NO_SKIPS=1 a skip is a failure: what a package index has is never a reason to skip. A browser is in none."""
    report = yield
    if report.skipped and os.environ.get("TOOLROLL_NO_SKIPS") and not hasattr(report, "wasxfail") and not _allowed(item, report):
        report.outcome = "failed"
        report.longrepr = f"skipped, and TOOLROLL_NO_SKIPS is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    if report.skipped and os.environ.get("TOOLROLL_NO_SKIPS") and ALLOWED not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped, and TOOLROLL_NO_SKIPS is set: {report.longrepr}"
    return report


def _allowed(item: pytest.Item, report: Any) -> bool:
    marked = any(item.get_closest_marker(name) is not None for name in ("browser", "peers"))
    return marked or ALLOWED in str(report.longrepr)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded tokenizer."""
    return load_embedded_tokenizer()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figures that passed tests recorded with `record_property("figure", ...)`."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
