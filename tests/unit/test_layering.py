"""The layers of the library: who may import whom, and no cycles."""

import ast
import importlib
from functools import cache
from graphlib import TopologicalSorter

from support.source import CORE, FLOORS, ROOT, library, own_imports

import toolroll

MAY_IMPORT = {
    "parsers": {"parsers"},
    "rollout": {"parsers", "rollout"},
    "agents": set(CORE),
    "endpoint": {"parsers", "rollout", "endpoint", "evaluation"},
    "environments": {*CORE, "endpoint", "environments"},
    "evaluation": {*CORE, "evaluation"},
    "testing": {"parsers", "rollout", "testing"},
    "trainers": {"parsers", "rollout", "endpoint", "evaluation", "trainers"},
    "cli": set(FLOORS),
    "": set(FLOORS),
}

MODULES = library()


@cache
def imports_of() -> dict[str, set[str]]:
    """Which modules of the library each of its modules imports."""
    return own_imports(MODULES)


def test_each_floor_imports_only_the_floors_below_it() -> None:
    """None imports the façade, which imports everything."""
    assert [
        f"{name} imports {imported}"
        for name, targets in sorted(imports_of().items())
        for imported in sorted(targets)
        if MODULES[imported].floor not in MAY_IMPORT[MODULES[name].floor]
    ] == []


def test_there_are_no_import_cycles() -> None:
    """Imports inside functions count as well: a cycle that is hidden in one is still a cycle."""
    TopologicalSorter(imports_of()).prepare()


def test_rollout_reaches_agents_by_entry_point_only() -> None:
    """No module below names one above as text either, as in
    `import_module("toolroll.environments.desk")`."""
    for module in MODULES.values():
        above = {"parsers": ("rollout", "agents"), "rollout": ("agents",)}.get(module.floor, ())
        for floor in above:
            assert f'"toolroll.{floor}.' not in module.text, f"{module.name} names toolroll.{floor}"


def test_types_and_errors_import_nothing_of_the_rollout() -> None:
    for name in ("rollout.errors", "rollout.media", "parsers.types"):
        assert imports_of()[f"toolroll.{name}"] == set()
    types = {"toolroll.parsers.types", "toolroll.rollout.media"}
    assert imports_of()["toolroll.rollout.types"] <= types


ROOMS = (
    ("errors", "media", "types"),
    ("environment",),
    ("episode",),
    ("runtime",),
    ("settings",),
    ("engine", "template", "session"),
    ("model",),
    ("runs",),
)
"""The rooms of `rollout` from the bottom up: each imports rooms below its own line only."""


ENDPOINT_ROOMS = (
    ("errors", "endpoint_settings"),
    ("requests",),
    ("conversation",),
    ("answers",),
    ("dialects", "disk"),
    ("sessions",),
    ("metrics", "replies", "endpoint", "queries"),
    ("http", "in_process"),
)
"""The rooms and modules of `endpoint`, in the same way. Modules of one line that are no
packages may import one another."""


def room(name: str, inside: str = "toolroll.rollout") -> str:
    """The room of a module of the package `inside`, "" for any other."""
    parts = name.removeprefix(f"{inside}.").split(".")
    return parts[0] if name.startswith(f"{inside}.") else ""


def upward_imports(inside: str, order: tuple[tuple[str, ...], ...]) -> list[str]:
    """The imports in the package `inside` between two rooms that `order` forbids."""
    height = {name: at for at, rooms in enumerate(order) for name in rooms}
    rooms = {room(name, inside) for name in MODULES} - {""}
    assert rooms == height.keys(), f"put the rooms of {inside} into their order in this file"
    files = {name.removeprefix(f"{inside}.") for name in MODULES}
    alone = {name for name in files if not any(other.startswith(f"{name}.") for other in files)}
    return [
        f"{name} imports {target}, which is not below it"
        for name, targets in imports_of().items()
        for target in targets
        for here, there in [(room(name, inside), room(target, inside))]
        if here and there and here != there
        if height[there] > height[here]
        or (height[there] == height[here] and not {here, there} <= alone)
    ]


def test_the_check_shares_no_code_with_what_it_checks() -> None:
    """A check that renders or encodes as the samples were made would share its errors."""
    reached: set[str] = set()
    waiting = ["toolroll.rollout.template.verify"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imports_of()[name]
    template = "toolroll.rollout.template."
    names = ("verify", "reference", "shown", "record", "served", "image_check")
    checks = {f"{template}{name}" for name in names}
    assert {name for name in reached if name.startswith(template)} == checks


FACTS = "toolroll.rollout.runtime.sglang_names"
"""Names of SGLang's, without code, which a contract test compares with the installed SGLang."""
ABOVE = {f"toolroll.testing{name}" for name in ("", ".reference_policy", ".serve")}
"""What plays benchmarks stands above the engine: it knows tasks and sessions' names, but no
tokens.
"""


def test_the_embedded_engine_shares_no_code_with_what_it_judges() -> None:
    """The engine imports nothing of ours but its own modules: nothing reaches it by a detour."""
    for name in filter(lambda name: ".testing" in name, MODULES):
        judged = ("toolroll.rollout.template", "toolroll.rollout.session")
        allowed = ("toolroll.testing.", FACTS)
        forbidden = [
            target
            for target in imports_of()[name]
            if (target.startswith(judged) if name in ABOVE else not target.startswith(allowed))
        ]
        assert forbidden == [], name
    tree = MODULES[FACTS].tree
    assert {type(node) for node in tree.body} == {ast.Expr, ast.ImportFrom, ast.Assign}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Lambda | ast.FunctionDef)]


def test_each_room_imports_only_the_rooms_below_it() -> None:
    assert upward_imports("toolroll.rollout", ROOMS) == [], "see docs/architecture.md"
    assert upward_imports("toolroll.endpoint", ENDPOINT_ROOMS) == []


def test_the_links_at_the_top_show_the_package() -> None:
    """For people only: nothing that runs needs them."""
    package = ROOT / "src" / "toolroll"
    for floor in CORE:
        assert (package / floor / "py.typed").is_file()
        assert (ROOT / floor).resolve() == package / floor
    # it would hide openai-agents from whoever works at the top
    assert not (package / "agents" / "__init__.py").exists()


def test_the_facade_names_each_home_once() -> None:
    """At run time and for the type checker."""
    homes = toolroll._HOME_OF
    assert sorted(homes) == sorted(toolroll.__all__) == dir(toolroll)
    names = [entry for entry, _ in MODULES["toolroll"].imports() if "toolroll." in entry]
    assert {name: home for home, _, name in (each.rpartition(".") for each in names)} == homes
    for name, home in homes.items():
        assert vars(importlib.import_module(home))[name] is getattr(toolroll, name)
