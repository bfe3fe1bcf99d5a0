"""The oracle shares no code with what it judges."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import toolroll.testing.engine as engine_module

FOLDER = Path(engine_module.__file__ or "").parent
ROOT = FOLDER.parent  # the package
JUDGED = (
    "toolroll.rollout.template",
    "toolroll.rollout.session",
    "toolroll.agents",
    "toolroll.rollout.engine",
    "toolroll.parsers",
)
FACTS = "toolroll.rollout.runtime.sglang_names"
"""Names of SGLang's, without code, which a contract test compares with the installed SGLang."""
# What plays benchmarks stands above the engine: it knows tasks and sessions' names, but no tokens.
ABOVE = {"__init__", "reference_policy", "serve"}


def imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("toolroll")}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_no_module_imports_templates_or_sessions(path: Path) -> None:
    banned = JUDGED[:2] if path.stem in ABOVE else JUDGED
    assert [name for name in imported(path) if name.startswith(banned)] == []


@pytest.mark.parametrize(
    "path",
    sorted(p for p in FOLDER.rglob("*.py") if p.stem not in ABOVE),
    ids=lambda path: path.stem,
)
def test_the_engine_imports_nothing_of_ours_but_its_own_modules(path: Path) -> None:
    """So nothing can reach it by a detour either."""
    allowed = ("toolroll.testing.", FACTS)
    assert [name for name in imported(path) if not name.startswith(allowed)] == []


def test_the_shared_names_are_no_code() -> None:
    tree = ast.parse((ROOT / "rollout/runtime/sglang_names.py").read_text())
    assert {type(node) for node in tree.body} == {ast.Expr, ast.ImportFrom, ast.Assign}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Lambda | ast.FunctionDef)]
