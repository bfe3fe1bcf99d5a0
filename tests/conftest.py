"""What every test runs under: the tiers, their distribution over processes, and allowed skips."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys

# A job in the background ignores Ctrl-C, which some tests need.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before numpy is imported. With more threads than free cores, OpenBLAS waits for its own threads,
# and the small matrices of the tests' models take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.faults.tally import COUNTS, Tally
from support.tiers import load_profile

from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.template.verifier_pool import POOL
from toolroll.testing import load_embedded_tokenizer

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

load_profile()

# Tests replace methods of verifiers, which another process would not see.
POOL.after = sys.maxsize
POOL.reset()

ALLOWED = "TOOLROLL_TEST_DATA"
"""A skip that names this variable is allowed everywhere: the extra data are in no package."""

LEFT_OUT = """\
The quick tier leaves out:
  tests/unit         the marker `slow`: all chat templates but six, and formats that differ in their markers only
  tests/adversarial  templates that were written to go wrong
  tests/faults       environments, engines and clients that misbehave
  tests/system       processes, kill -9, signals, the command line, wheels, mypy of new-env, the page in Chromium
  tests/contract     types and programs of other projects: SGLang's parsers, litellm, openai-agents, datasets, tau2
  tests/integration  the real SGLang server and router, Ray
`make test-all` runs all of it, with more examples of each property; `make test-peers` runs what is on GitHub only."""  # noqa: E501

BY_PARAMETER = ("unit/template/test_conformance.py", "unit/template/test_conversations.py")
"""Files with one costly case a template: each template is a scope of its own."""

OWN_SERVERS = ("desk_model", "learn_real", "older_sglang", "ray_runs", "trl_async")
"""The files of tests/integration that share no server with the others."""

FIRST = ("tests/unit/test_frozen.py", "tests/integration", "tests/system", "tests/contract")
"""The scopes that take longest begin first, so that no process waits long for the last one. The
others begin in the order of their number of tests.
"""


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded tokenizer."""
    return load_embedded_tokenizer()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test alone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["embedded", "qwen3"], scope="module")
def any_tokenizer(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    """The embedded tokenizer, and Qwen3's, whose template strips thoughts and groups results."""
    from support.qwen import tokenizer_for, trl_template

    return tokenizer if request.param == "embedded" else tokenizer_for(trl_template("qwen3"))


@pytest.fixture(scope="module")
def unfrozen() -> Iterator[None]:
    """Objects that the garbage collector visits, as in a process without pytest."""
    PACED.close()
    yield
    PACED.enter_context(paced_garbage())


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Counts of injected faults and of their episodes; added up at the end of a run."""
    made = Tally()
    record_property("faults", made.counts)
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Make asyncio's own event loops the default. Importing SGLang or AReaL makes uvloop's the
    default, and the tests' clock does not work on them.
    """
    if not isinstance(asyncio.get_event_loop_policy(), asyncio.DefaultEventLoopPolicy):
        asyncio.set_event_loop_policy(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under TOOLROLL_NO_SKIPS=1, a skip is a failure, unless the test needs a browser, a peer or
    TOOLROLL_TEST_DATA.
    """
    report = yield
    marked = any(item.get_closest_marker(name) is not None for name in ("browser", "peers"))
    if not (marked or hasattr(report, "wasxfail")):
        _fail_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    _fail_skipped(report)
    return report


def _fail_skipped(report: Any) -> None:
    why = str(report.longrepr)
    if report.skipped and os.environ.get("TOOLROLL_NO_SKIPS") and ALLOWED not in why:
        report.outcome = "failed"
        report.longrepr = f"skipped, and TOOLROLL_NO_SKIPS is set: {why}"


PACED = ExitStack()
"""Holds `paced_garbage` while tests run."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: nothing that is imported becomes garbage. Then hide
    what exists from it: each model that is opened would visit the million objects of pytest and
    of what the tests import.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        PACED.enter_context(paced_garbage())


def pytest_unconfigure() -> None:
    PACED.close()


PASSED = "TOOLROLL_PASSED"
"""Names a file with the ids of the tests that passed. They are not run again, and the tests that
pass now are added: the steps of `.ci/run` share one, so that no test runs twice.
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that `PASSED` lists, and put the scopes of the others in order."""
    file = Path(os.environ.get(PASSED, ""))
    if file.is_file():
        passed = frozenset(file.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    tests = Counter(scope_of(item.nodeid) for item in items)
    items.sort(key=lambda item: _place(scope_of(item.nodeid), tests))


def scope_of(nodeid: str) -> str:
    """What one process runs in a row: a file, all files with the real servers, or one template."""
    path = nodeid.partition("::")[0]
    name = path.removeprefix("tests/integration/test_").removesuffix(".py")
    if path.startswith("tests/integration/") and name not in OWN_SERVERS:
        return "tests/integration"
    if path.endswith(BY_PARAMETER) and "[" in nodeid:
        return f"{path}[{nodeid.partition('[')[2]}"
    return path


def _place(scope: str, tests: Mapping[str, int]) -> tuple[int, int, str]:
    """Where `scope` comes among the others: see `FIRST`."""
    first = next((at for at, begin in enumerate(FIRST) if scope.startswith(begin)), len(FIRST))
    return first, -tests[scope], scope


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """pytest-xdist's scheduler with the scopes of `scope_of`, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return ByScope(config, log)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the recorded figures of passed tests, what the quick tier leaves out,
    and add the ids to `PASSED`.
    """
    totals = dict.fromkeys(COUNTS, 0)
    passed, failed, errors = (
        terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed", "error")
    )
    for report in [*passed, *failed]:
        for name, value in report.user_properties:
            if name == "figure" and report.passed:
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
            if name == "faults":
                totals = {key: totals[key] + value[key] for key in COUNTS}
    if any(totals.values()):
        counts = ", ".join(f"{n} {key}" for key, n in totals.items())
        terminalreporter.write_line(f"faults: {counts}")
    if "not slow" in config.option.markexpr:
        terminalreporter.write_line(LEFT_OUT)
    if (file := os.environ.get(PASSED)) and not hasattr(config, "workerinput"):
        wrong = {report.nodeid for report in [*failed, *errors]}
        with Path(file).open("a", encoding="utf-8") as ids:
            ids.writelines(f"{each.nodeid}\n" for each in passed if each.nodeid not in wrong)
