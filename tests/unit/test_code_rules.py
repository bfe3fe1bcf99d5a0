"""The house rules that no linter checks: lengths, docstrings, what may be caught, no state and
no environment at import. ruff checks prints and positional booleans (`T20`, `FBT`)."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.source import ROOT, Module, library, read_module

MODULES = library()
FUNCTION_LINES = 60
MODULE_LINES = 510  # about 400; the longest holds all data types
BORDER = re.compile(r"# (noqa: BLE001 - \S+ \S+|.*\bborder\b)")
"""What a handler that swallows every exception must say: why this is a border."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[Module], Iterator[str]]


def too_long(module: Module) -> Iterator[str]:
    lines = len(module.text.splitlines())
    if lines > MODULE_LINES:
        yield f"{module.name} has {lines} lines"
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            # Without signature and docstring: a command's options are its documentation.
            first = node.body[bool(ast.get_docstring(node)) and len(node.body) > 1]
            length = (node.end_lineno or node.lineno) - first.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{module.name}.{node.name} has {length} lines"


def swallowed(module: Module) -> Iterator[tuple[ast.ExceptHandler, str]]:
    """Each handler that raises nothing, and the exceptions that it names."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and not any(
            isinstance(inner, ast.Raise) for inner in ast.walk(node)
        ):
            yield node, ast.unparse(node.type) if node.type else "BaseException"


def swallows_everything(module: Module) -> Iterator[str]:
    lines = module.text.splitlines()
    for node, caught in swallowed(module):
        line = lines[node.lineno - 1]
        if re.search(r"\b(Base)?Exception\b", caught) and not BORDER.search(line):
            yield f"{module.name}:{node.lineno} catches {caught} without a stated border"


def swallows_cancellation(module: Module) -> Iterator[str]:
    """`CancelledError` passes through: a handler that names it raises again."""
    for node, caught in swallowed(module):
        if "CancelledError" in caught:
            yield f"{module.name}:{node.lineno} swallows CancelledError"


def acts_at_import(module: Module) -> Iterator[str]:
    """No environment variable is written, and none is read, while a module is imported; no
    `global` anywhere."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield f"{module.name}:{node.lineno} has global state: {', '.join(node.names)}"
    for node in _at_import(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            yield f"{module.name}:{node.lineno} touches the environment at import"


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from _at_import(child)


def guesses(module: Module) -> Iterator[str]:
    """No `hasattr` as design: what an object can do stands in its type. No `breakpoint`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in ("hasattr", "breakpoint"):
            yield f"{module.name}:{node.lineno} names {node.id}"


def machine_paths(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), 1):
        if re.search(r"(?<![\w.{}])/(home|root|work|Users)/\w", line):
            yield f"{module.name}:{number} holds a machine's path"


def without_docstrings(module: Module) -> Iterator[str]:
    """A module, and each public class, function and method in it. An override may leave its
    docstring to what it overrides."""
    if not ast.get_docstring(module.tree):
        yield f"{module.name} has no docstring"
    loaded = importlib.import_module(module.name)
    for node in module.tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            found = getattr(loaded, node.name, None)
            if found is None:
                continue
            if not inspect.getdoc(found) or _generated(found):
                yield f"{module.name}.{node.name} has no docstring"
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    public = isinstance(method, Function) and not method.name.startswith("_")
                    if public and not any(_documents(base, method.name) for base in found.__mro__):  # type: ignore[attr-defined]
                        yield f"{module.name}.{node.name}.{method.name} has no docstring"  # type: ignore[attr-defined]


def _generated(found: object) -> bool:
    """A dataclass without a docstring gets its signature for one."""
    return isinstance(found, type) and (found.__doc__ or "").startswith(f"{found.__name__}(")


def _documents(kind: type, name: str) -> bool:
    return name in vars(kind) and bool(inspect.getdoc(vars(kind)[name]))


TRY = "try:\n    f()\nexcept {}\n    {}\n".format
CASES: list[tuple[Rule, str, int]] = [
    (too_long, "def f():\n" + "    x = 1\n" * 61, 1),
    (swallows_everything, TRY("Exception:", "pass"), 1),
    (swallows_everything, TRY("Exception:  # noqa: BLE001", "pass"), 1),  # without a reason
    (swallows_everything, TRY("Exception:  # noqa: BLE001 - the episode's border", "pass"), 0),
    (swallows_everything, TRY("Exception as error:", "raise ValueError from error"), 0),
    (swallows_cancellation, TRY("asyncio.CancelledError:", "pass"), 1),
    (acts_at_import, "import os\nos.environ['X'] = '1'\n", 1),
    (guesses, "if hasattr(x, 'y'):\n    pass\n", 1),
    (machine_paths, "path = '/home/somebody/data'\n", 1),
]
"""A module, and how often a rule finds that it breaks it."""
RULES = dict.fromkeys(rule for rule, _, _ in CASES)


@pytest.mark.parametrize("rule", [*RULES, without_docstrings], ids=lambda rule: rule.__name__)
def test_the_library_keeps_the_rule(rule: Rule) -> None:
    assert [words for module in MODULES.values() for words in rule(module)] == []


@pytest.mark.parametrize(("rule", "text", "problems"), CASES)
def test_a_rule_finds_what_breaks_it(rule: Rule, text: str, problems: int, tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(text)
    assert len(list(rule(read_module(file, tmp_path)))) == problems


NOT_QUICK = frozenset(
    "datasets litellm multiprocessing playwright pyarrow ray sglang subprocess torch "
    "xgrammar".split()
)  # what starts processes, and what tests/requirements.txt does not install


def not_quick(module: Module) -> list[str]:
    return sorted({name.split(".")[0] for name, _ in module.imports()} & NOT_QUICK)


def test_unit_tests_start_no_process_and_need_no_heavy_package() -> None:
    files = (ROOT / "tests" / "unit").rglob("*.py")
    assert {str(file): found for file in files if (found := not_quick(read_module(file)))} == {}
