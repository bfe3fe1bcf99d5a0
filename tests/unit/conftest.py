"""The command as a shell runs it."""

from collections.abc import Callable

import pytest
from support.commands import run_main


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `toolroll`: its exit status, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = run_main(monkeypatch, *arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
