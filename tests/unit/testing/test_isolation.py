"""The oracle shares no code with what it judges."""

import ast

import pytest
from support.source import library, own_imports

MODULES = library()
TESTING = {name: targets for name, targets in own_imports(MODULES).items() if ".testing" in name}
FACTS = "toolroll.rollout.runtime.sglang_names"
"""Names of SGLang's, without code, which a contract test compares with the installed SGLang."""
ABOVE = {f"toolroll.testing{name}" for name in ("", ".reference_policy", ".serve")}
"""What plays benchmarks stands above the engine: it knows tasks and sessions' names, but no
tokens.
"""


@pytest.mark.parametrize("name", TESTING)
def test_no_module_imports_what_it_judges(name: str) -> None:
    """The engine imports nothing of ours but its own modules: nothing reaches it by a detour."""
    if name in ABOVE:
        judged = ("toolroll.rollout.template", "toolroll.rollout.session")
        assert [target for target in TESTING[name] if target.startswith(judged)] == []
    else:
        allowed = ("toolroll.testing.", FACTS)
        assert [target for target in TESTING[name] if not target.startswith(allowed)] == []


def test_the_shared_names_are_no_code() -> None:
    tree = MODULES[FACTS].tree
    assert {type(node) for node in tree.body} == {ast.Expr, ast.ImportFrom, ast.Assign}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Lambda | ast.FunctionDef)]
