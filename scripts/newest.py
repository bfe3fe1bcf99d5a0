"""Compare each pinned peer and client with the newest release on its index: `make newest`.

The table has the pin, the newest release, and which transformers, SGLang and Python that release
allows. With `--test FOLDER`, each newer release is installed without its dependencies in a folder
of its own in FOLDER, and the tests that import it run with that folder first on the path. The exit
status is 1 if one of them fails, or if an index did not answer for a pin. `python -m clients
--newest` plays the newest clients.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
TABLE = "| package | pinned | newest | which allows | Python |\n|---|---|---|---|---|"
SHOWN = ("transformers", "sglang")
CORE = ("torch", "transformers")
"""Pinned for the figures of the documents. `make test-transformers` runs other versions."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# A release for a newer Python counts too: pip would hide it.
ASK = (
    "--dry-run --no-deps --ignore-installed --ignore-requires-python --only-binary :all: "
    "--python-version 3.12 --target unused --quiet --report -"
).split()
COMMIT = re.compile(r"git\+(https://\S+?)@([0-9a-f]{40})")
NPM = re.compile(r"(@?[\w./-]+)@(\d[\w.-]*)")


@dataclass(frozen=True)
class Pin:
    """A pinned package of the index `kind`: `pip`, `npm` or `git`."""

    kind: str
    name: str
    pinned: str
    newest: str = ""
    """Empty if the index did not say it."""
    allows: str = ""
    python: str = ""

    @property
    def is_old(self) -> bool:
        return self.newest not in ("", self.pinned)

    @property
    def row(self) -> str:
        newest = (self.newest or "unknown") if self.newest != self.pinned else "the same"
        return f"| {self.name} | {self.pinned} | {newest} | {self.allows} | {self.python} |"


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `command` in the project's folder. The result has its output and its exit status."""
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def pins_in(words: Iterable[str]) -> Iterator[Pin]:
    """The pins among `words`: requirements with `==`, npm's `name@version`, and commits."""
    for word in words:
        if commit := COMMIT.match(word):
            yield Pin("git", *commit.groups())
        elif npm := NPM.fullmatch(word):
            yield Pin("npm", *npm.groups())
        elif "==" in word:
            try:
                requirement = Requirement(word)
            except InvalidRequirement:  # such as "openai==$(OLDEST_OPENAI).*" in the Makefile
                continue
            [version] = [each.version for each in requirement.specifier]
            yield Pin("pip", canonicalize_name(requirement.name), version)


def pins() -> list[Pin]:
    """All pins: the requirements files, the Makefile, and the clients of `make test-clients`."""
    words = re.split(r"[\s\"]", (ROOT / "Makefile").read_text(encoding="utf-8"))
    words += re.findall(r'"(\S+?)"', (TESTS / "clients" / "table.py").read_text(encoding="utf-8"))
    for file in [*TESTS.glob("requirements*.txt"), *ROOT.glob("benchmarks/requirements*.txt")]:
        if "sglang" not in file.name:  # a trainer's own pins
            lines = file.read_text(encoding="utf-8").splitlines()
            words += [line.partition("#")[0].strip() for line in lines]
    found = {pin for pin in pins_in(words) if pin.name not in CORE}
    return sorted(found, key=lambda pin: (pin.name, pin.pinned))


def with_newest(pin: Pin) -> Pin:
    """Ask the index for the newest release of `pin`, and for what it allows."""
    if pin.kind == "git":
        head = run("git", "ls-remote", pin.name, "HEAD", GIT_TERMINAL_PROMPT="0").stdout
        return replace(pin, newest=head[:40])
    if pin.kind == "npm":
        return replace(pin, newest=run("npm", "view", pin.name, "version").stdout.strip())
    report = run(*PIP, "install", *ASK, pin.name).stdout
    if not report:  # it has no wheel
        versions = run(*PIP, "index", "versions", "--ignore-requires-python", pin.name).stdout
        found = re.match(r"\S+ \((.*)\)", versions)
        return replace(pin, newest=found[1] if found else "")
    metadata = json.loads(report)["install"][0]["metadata"]
    requirements = map(Requirement, metadata.get("requires_dist", ()))
    shown = dict.fromkeys(map(allowed, (each for each in requirements if each.name in SHOWN)))
    return replace(
        pin,
        newest=metadata["version"],
        allows="; ".join(shown),
        python=metadata.get("requires_python", ""),
    )


def allowed(requirement: Requirement) -> str:
    """`requirement` with the extra that has it, such as `sglang==0.5.12 [sglang]`."""
    extra = re.search(r"extra == \"(.*?)\"", str(requirement.marker))
    return f"{requirement.name}{requirement.specifier}" + (f" [{extra[1]}]" if extra else "")


def tests_of(name: str) -> list[Path]:
    """The test files that import the package `name`, or a file of `tests/support` that does."""
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    modules = [one for one, names in packages_distributions().items() if name in map(plain, names)]
    wanted = [rf"(import|from) {one}\b|[\"']{one}[\"'.]" for one in modules]
    found: list[Path] = []
    while wanted:
        pattern = re.compile("|".join(wanted))
        new = [path for path in texts if path not in found and pattern.search(texts[path])]
        found += new
        stems = [path.stem for path in new if path.parent.name == "support"]
        wanted = [rf"from support(\.| import .*\b){stem}\b" for stem in stems]
    return sorted(path for path in found if path.name.startswith("test_"))


def plain(name: str) -> str:
    return canonicalize_name(name)


def test(pin: Pin, folder: Path) -> tuple[str, str]:
    """Run the tests of `pin` with its newest release. Return `passed`, `failed` or `not run`, and
    the details.
    """
    files = tests_of(pin.name)
    if pin.kind != "pip" or not files:
        return "not run", "no test imports it"
    if not SpecifierSet(pin.python).contains(platform.python_version()):
        return "not run", f"it needs Python {pin.python}"
    home = folder.absolute() / f"{pin.name}-{pin.newest}"
    install = ("install", "--quiet", "--no-deps", "--upgrade", "--target")
    installed = run(*PIP, *install, home, f"{pin.name}=={pin.newest}")
    if installed.returncode:
        return "failed", installed.stderr.splitlines()[-1]
    pytest = ("-m", "pytest", "-q", "-m", "not peers", "-p", "no:cacheprovider")
    path = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
    ran = run(sys.executable, *pytest, *files, PYTHONPATH=path)
    lines = ran.stdout.splitlines() or ran.stderr.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return ("failed" if ran.returncode else "passed"), "\n  ".join([lines[-1], *failed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="packages; all, if none is named")
    parser.add_argument("--test", type=Path, metavar="FOLDER", help="test the newer releases")
    options = parser.parse_args()
    chosen = [pin for pin in pins() if not options.names or pin.name in options.names]
    print(TABLE)
    asked: list[Pin] = []
    with ThreadPoolExecutor(4) as pool:
        for pin in pool.map(with_newest, chosen):
            asked.append(pin)
            print(pin.row, flush=True)
    results = []
    for pin in asked:
        if pin.is_old and options.test is not None:
            result, details = test(pin, options.test)
            results.append(result)
            print(f"{result}: {pin.name} {pin.newest}: {details}", flush=True)
    unknown = [pin.name for pin in asked if not pin.newest]
    if unknown:
        print(f"the index did not answer for {', '.join(unknown)}")
    sys.exit("failed" in results or bool(unknown))


if __name__ == "__main__":
    main()
