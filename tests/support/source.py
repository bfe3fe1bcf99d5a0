"""The source of the library, for tests of its structure: modules, imports and syntax trees."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("parsers", "rollout", "agents")
"""The packages of the core, from the bottom up."""
AROUND = ("endpoint", "environments", "evaluation", "testing", "trainers", "cli")
"""The packages around the core, which it never imports."""
FLOORS = (*CORE, *AROUND)


@dataclass(frozen=True)
class Module:
    """One file: its import name, its text and its syntax tree."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed when it is first asked for, not when tests are collected."""
        return ast.parse(self.text, filename=str(self.path))

    @property
    def floor(self) -> str:
        """One of `FLOORS`, or "" for the façade and `python -m toolroll`."""
        first = [*self.name.split("."), ""][1]
        return first if first in FLOORS else ""

    def imports(self) -> Iterator[tuple[str, ast.AST]]:
        """The full name of everything that is imported, in functions and for type checkers too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}:{node.lineno}: a relative import"
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node


def read_module(path: Path, root: Path = ROOT) -> Module:
    """The module in `path`; its name follows from its place in the package."""
    package = root / "src" / "toolroll"
    inside = path.relative_to(package if path.is_relative_to(package) else root)
    parts = list(inside.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return Module(".".join(["toolroll", *parts]), path, path.read_text(encoding="utf-8"))


@cache
def library(root: Path = ROOT) -> dict[str, Module]:
    """Every module of the library, by name."""
    found = [read_module(path, root) for path in sorted((root / "src" / "toolroll").rglob("*.py"))]
    return {module.name: module for module in found}


def own_imports(modules: dict[str, Module]) -> dict[str, set[str]]:
    """What each of `modules` imports: `from a.b import c` is a.b.c if it is a module, else a.b."""
    graph: dict[str, set[str]] = {}
    for module in modules.values():
        graph[module.name] = set()
        for name, _ in module.imports():
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != module.name:
                graph[module.name].add(name)
    return graph
