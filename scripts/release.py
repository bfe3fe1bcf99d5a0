"""Make the files of a release and try them: `make release`.

The sdist and the wheel are made from the last commit, whose id is in both, in `OUT`. Their content,
size and metadata are checked, twine renders the README, and for each Python the wheel is installed
from the index in an empty environment, where its command plays the demo (without BFCL, which is no
dependency). With `--tag v0.1.0`, the tag must name the version, and CHANGELOG.md the day.

The exit status is 1 if something is wrong; the last line says what.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_BYTES = 5_000_000
TOPS = {"toolroll", "toolroll_harbor", "toolroll_verifiers"}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Return what `command` printed. Raise SystemExit with its last lines if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def last_commit(to: Path) -> str:
    """Write the files of the last commit, and its id, to `to`. Return the id. Raise SystemExit if
    tracked files differ from it.
    """
    if changed := run("git", "status", "--porcelain", "--untracked-files=no"):
        raise SystemExit(f"commit these changes first:\n{changed}")
    commit = run("git", "rev-parse", "HEAD").strip()
    archive = to / "source.tar"
    run("git", "archive", "--output", archive, commit)
    with tarfile.open(archive) as files:
        files.extractall(to / "source", filter="data")
    write_commit(to / "source", commit)
    return commit


def write_commit(source: Path, commit: str) -> None:
    """Write the id of a commit where `toolroll.rollout.runs.provenance` reads it."""
    (source / "src/toolroll/commit.json").write_text(f'{{"commit_id": "{commit}"}}\n')


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Build `source`. Return the sdist, and the wheel that was built from it."""
    run(sys.executable, "-m", "build", "--outdir", out, source)
    [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def problems(sdist: Path, wheel: Path, source: Path) -> list[str]:
    """Return what is wrong with the two files, which were built from `source`, in words."""
    with zipfile.ZipFile(wheel) as file:
        inside = set(file.namelist())
        [metadata_name] = (name for name in inside if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(file.read(metadata_name).decode())
    with tarfile.open(sdist) as files:
        members = files.getmembers()
    packed = {member.name.partition("/")[2] for member in members}
    paths = [path for path in (source / "src").rglob("*") if path.suffix not in ("", ".pyc")]
    expected = {
        path.relative_to(source / "src").as_posix()
        for path in paths
        if path.is_file() and ".egg-info" not in str(path)
    }
    found = {name for name in inside if ".dist-info/" not in name}
    [own] = re.findall(r'__version__ = "(.+)"', (source / "src/toolroll/__init__.py").read_text())
    wrong = [f"the wheel lacks {name}" for name in sorted(expected - found)]
    wrong += [f"the wheel has {name}" for name in sorted(found - expected)]
    wrong += [f"the wheel has the package {top}" for top in {n.split("/")[0] for n in found} - TOPS]
    wrong += [f"the sdist has a link: {m.name}" for m in members if m.issym() or m.islnk()]
    wrong += [
        f"the sdist lacks {name}"
        for name in ("CHANGELOG.md", "Makefile", "docs/architecture.md", "tests/conftest.py")
        if name not in packed
    ]
    if wheel.stat().st_size > MOST_BYTES:
        wrong.append(f"the wheel has {wheel.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    if not any(name.endswith("licenses/LICENSE") for name in inside):
        wrong.append("the wheel has no license")
    if (version := metadata["Version"]) != own:
        wrong.append(f"the version is {version}, but toolroll.__version__ is {own}")
    return wrong


def tag_problems(tag: str, version: str, changelog: str) -> list[str]:
    """Return what is wrong with a release of `version` under `tag`, in words."""
    wrong = [] if tag == f"v{version}" else [f"the tag is {tag}, the version {version}"]
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        wrong.append(f"CHANGELOG.md has no line '## {version} (YYYY-MM-DD)'")
    return wrong


def play(wheel: Path, python: str, folder: Path, commit: str) -> None:
    """Install `wheel` in an empty environment of `python`, and play the demo there."""
    run(python, "-m", "venv", folder)
    own = folder / "bin" / "python"
    run(own, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, cwd=folder)
    code = "from toolroll.rollout.runs.provenance import commit; print(commit())"
    if (found := run(own, "-c", code, cwd=folder).strip()) != commit:
        raise SystemExit(f"{python}: provenance has the commit {found}, not {commit}")
    run(folder / "bin" / "toolroll", "demo", "--out", folder / "demo", cwd=folder)
    episodes = len((folder / "demo" / "episodes.jsonl").read_text().splitlines())
    print(f"{run(own, '--version', cwd=folder).strip()}: installed, {episodes} episodes played")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", nargs="*", default=["python3.11", "python3.12", "python3.13"])
    parser.add_argument("--tag", help="of the release, as v0.1.0")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        commit = last_commit(work)
        sdist, wheel = build(work / "source", options.out)
        wrong = problems(sdist, wheel, work / "source")
        if options.tag:
            changelog = (work / "source" / "CHANGELOG.md").read_text()
            wrong += tag_problems(options.tag, wheel.name.split("-")[1], changelog)
        if wrong:
            raise SystemExit("\n".join(wrong))
        print(run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel), end="")
        for python in options.python:
            play(wheel, python, work / python.replace("/", "_"), commit)
    print(f"{sdist.name}, {wheel.name}: commit {commit}, {wheel.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
