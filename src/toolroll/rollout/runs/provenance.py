"""`provenance`: the software, model and command that produced a run.

Invariants: the result contains no API keys, and no passwords in addresses. Collecting the result
never makes a run fail.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from toolroll.rollout.environment import EnvironmentFactory
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.registry import GROUP

Provenance = dict[str, Any]

_CREDENTIALS = re.compile(r"(://)[^/?#\s\"']*@")
_NAME = r"(?:api[-_]?key|access[-_]?key|token|secret|passw(?:or)?d|authorization)"
_VALUE = (
    r"""\[[^\]]*\]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?:bearer|basic)\s+[^"'&\s,}]+|[^"'&\s,}]+"""
)
_KEY = re.compile(rf"""({_NAME}["']?\s*[=:]\s*)({_VALUE})""", re.IGNORECASE)
_OPTION = re.compile(rf"--?[\w-]*{_NAME}", re.IGNORECASE)
"""An option such as `--api-key`. The next word is its value, a secret."""
_ISSUED = re.compile(r"\b(?:sk|hf|ghp)[-_][\w-]{16,}")
"""Keys for OpenAI, Hugging Face and GitHub, anywhere in a text."""


async def provenance(
    served: Model | None,
    factory: EnvironmentFactory | None = None,
    command: Sequence[str] | None = None,
) -> Provenance:
    """Return the versions, model and command of a run as plain JSON. Unknown values are null.

    `served`: None for an agent that does not use a `Model`. `factory`: None for `toolroll serve`,
    which records sessions. `command`: by default, the command of this process.
    """
    entry: Provenance = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_without_secrets(sys.argv if command is None else command),
        "python": sys.version.split()[0],
        "toolroll": package_version("toolroll"),
        "commit": commit(),
        "transformers": package_version("transformers"),
        "benchmark": {} if factory is None else benchmark_packages(factory),
    }
    if served is None:
        return entry
    facts = await served.engine.model_info()
    hashes = await served.run_in_thread(template_hashes, served)
    return entry | {
        "sglang": facts.sglang_version,
        "engine_model_path": facts.model_path,
        "weight_version": facts.weight_version,
        "session_cache": facts.session_cache,
        "encoder": served.template.encoder.method,
        **hashes,
    }


def without_secrets(text: str) -> str:
    """Return `text` with `***` for keys, and for users and passwords in addresses."""

    def hidden(match: re.Match[str]) -> str:
        quote = match[2][0] if match[2][0] in "\"'" else ""
        return f"{match[1]}{quote}***{quote}"

    return _ISSUED.sub("***", _KEY.sub(hidden, _CREDENTIALS.sub(r"\1***@", text)))


def command_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command without secrets. The word after an option such as `--api-key`
    is a secret.
    """
    return [
        "***" if _OPTION.fullmatch(before) else without_secrets(word)
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_digest(name: str) -> str:
    """Return a hash of the files of an installed package, or "" if there is none."""
    try:
        files = [file for file in distribution(name).files or () if file.suffix != ".pyc"]
    except PackageNotFoundError:
        return ""
    paths = {str(file): Path(str(file.locate())) for file in files if "dist-info" not in str(file)}
    spec = find_spec(name.replace("-", "_"))
    for folder in (spec and spec.submodule_search_locations) or ():  # of an editable installation
        for path in Path(folder).rglob("*"):
            if path.suffix != ".pyc":
                paths[f"{Path(folder).name}/{path.relative_to(folder)}"] = path
    present = {file: path for file, path in sorted(paths.items()) if path.is_file()}
    total = hashlib.sha256()
    for file, path in present.items():
        total.update(f"{file} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def commit() -> str | None:
    """Return toolroll's commit, with "-dirty" appended if tracked files differ from it.

    If toolroll does not run from a checkout, and was neither installed from the address of a
    repository (`git+https://...`) nor released (`make release`), return a hash of its files:
    "files 0123456789abcdef".
    """
    root = Path(__file__).parents[4]
    if (root / ".git").exists():
        return checkout_commit(root)
    installed = _installed_commit()
    if installed is None:
        return f"files {package_digest('toolroll')}"
    return f"{installed}-dirty" if _is_edited("toolroll") else installed


def checkout_commit(root: Path) -> str | None:
    """Return the commit of the checkout `root`, with "-dirty" appended if tracked files differ from
    it. Return None if `root` is not a checkout.
    """
    if not (root / ".git").exists():
        return None
    ask = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _installed_commit() -> str | None:
    try:
        text = distribution("toolroll").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    released = Path(__file__).parents[2] / "commit.json"  # scripts/release.py writes it
    facts = orjson.loads(released.read_bytes()) if released.exists() else {}
    commit_id: str | None = orjson.loads(text or "{}").get("vcs_info", facts).get("commit_id")
    return commit_id


def _is_edited(name: str) -> bool:
    """Return whether a file of an installed package differs from what was installed."""
    for file in distribution(name).files or ():
        path = Path(str(file.locate()))
        if file.hash is not None and file.suffix != ".pyc":
            digest = hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest()
            if urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                return True
    return False


def benchmark_packages(factory: EnvironmentFactory) -> dict[str, str | None]:
    """Return the versions of the environment's packages by name.

    These are the package that registers the environment, and the packages that the factory lists in
    `packages` because it reads their data or code. toolroll itself is left out. The factory's
    `sources` (name and version of other data) are added.
    """
    names = {
        entry.dist.name
        for entry in entry_points(group=GROUP)
        if entry.name == factory.name and entry.dist is not None
    } | set(getattr(factory, "packages", ()))
    packages = {name: package_version(name) for name in sorted(names - {"toolroll"})}
    return packages | dict(getattr(factory, "sources", {}))


def template_hashes(served: Model) -> dict[str, str]:
    """Return the SHA-256 hashes of the chat template's text and of the tokenizer."""
    tokenizer = served.template.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = (
        orjson.dumps(sorted(tokenizer.get_vocab().items()))
        if backend is None
        else backend.to_str().encode()
    )
    return {
        "template_sha256": hashlib.sha256(served.template.renderer.source.encode()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(content).hexdigest(),
    }


def extended(history: Sequence[Provenance], now: Provenance) -> list[Provenance]:
    """Return `history`, with one more entry if `now` differs from it.

    The first entry is complete. Each later entry has the date and the values that changed. A new
    date alone is not a difference.
    """
    before = latest(history)
    changed = {
        name: value
        for name, value in now.items()
        if name != "date" and (name not in before or before[name] != value)
    }
    if not history:
        return [now]
    return [*history, {"date": now["date"], **changed}] if changed else list(history)


def latest(history: Sequence[Provenance]) -> Provenance:
    """Return the last provenance of `history`, completely."""
    return {name: value for entry in history for name, value in entry.items()}
