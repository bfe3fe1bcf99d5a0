"""From the repository to a wheel to a clean environment: what a user gets with `pip install`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", "out", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
FLOORS = ("parsers", "rollout", "agents")
OPENAI_AGENTS = next(
    line
    for line in (ROOT / "tests/requirements-all.txt").read_text().splitlines()
    if line.startswith("openai-agents")
)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # it would show our own tree
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=NOT_SOURCE)
    run(sys.executable, "-m", "build", "--outdir", folder, folder / "source")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and openai-agents in it; their
    dependencies come from this one.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    python = folder / "bin" / "python"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
    )
    run(*pip, OPENAI_AGENTS)
    run(*pip, wheel)
    # Plain lines: the folders are searched, the .pth files in them (our own editable install) are
    # not read.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


def names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in names(wheel) if name.endswith(".py")}
    expected = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert inside == expected
    tops = {name.split("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "toolroll",
        "toolroll_harbor",
        "toolroll_verifiers",
    }


def test_the_wheel_holds_the_data_and_the_types_marker(wheel: Path) -> None:
    inside = set(names(wheel))
    assert {"toolroll/py.typed", *(f"toolroll/{floor}/py.typed" for floor in FLOORS)} <= inside
    kinds = (".json", ".jinja", ".html", ".css", ".js", ".safetensors")
    data = [p for p in (ROOT / "src").rglob("*") if p.suffix in kinds]
    assert {str(path.relative_to(ROOT / "src")) for path in data} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert wheel.stat().st_size < 10_000_000


def test_the_sdist_holds_the_package_as_files_and_no_links(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        members = sdist.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    inside = {member.name.partition("/")[2] for member in members}
    for needed in ("src/toolroll/rollout/types.py", "docs/architecture.md", "tests/conftest.py"):
        assert needed in inside
    assert {"CHANGELOG.md", "Makefile", "examples/quickstart.py"} <= inside


def test_the_dependencies_are_light(wheel: Path) -> None:
    [name] = [name for name in names(wheel) if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(zipfile.ZipFile(wheel).read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert len(required) <= 12
    heavy = ("torch", "sglang", "bfcl", "litellm", "openai", "ray", "vllm", "pandas")
    assert not [line for line in required if line.lower().startswith(heavy)]
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("where", ["elsewhere", "the repository's root"])
def test_installed_beside_openai_agents_both_are_importable(
    clean: Path, where: str, tmp_path: Path
) -> None:
    """Its import name is `agents`; from the repository's root our folder of that name is in the
    way unless it is no package.
    """
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


def test_no_file_of_ours_is_one_of_openai_agents(clean: Path, wheel: Path) -> None:
    code = (
        "from importlib.metadata import files; print('\\n'.join(map(str, files('openai-agents'))))"
    )
    theirs = set(run(clean, "-c", code).split())
    assert "agents/__init__.py" in theirs
    assert theirs & set(names(wheel)) == set()


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
    """Every public name, the embedded tokenizer (a data file), the entry points, and the
    command.
    """
    code = (
        "import toolroll\n"
        "for name in toolroll.__all__: getattr(toolroll, name)\n"
        "from toolroll.testing import load_embedded_tokenizer\n"
        "print(len(load_embedded_tokenizer()) > 0, "
        "len(toolroll.load_environment('desk').tasks('test')) > 0)\n"
    )
    assert run(clean, "-c", code, cwd=tmp_path).split() == ["True", "True"]
    assert "desk" in run(clean.parent / "toolroll", "envs", cwd=tmp_path)
