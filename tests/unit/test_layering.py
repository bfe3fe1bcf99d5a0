"""The layers of the library: who may import whom, and no cycles."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

import pytest
from support.source import FLOORS, ROOT, a_cycle, library, own_imports

MAY_IMPORT = {"parsers": {"parsers"}, "rollout": {"parsers", "rollout"}, "agents": set(FLOORS), "": {*FLOORS, ""}}

MODULES = library()


@cache
def imports_of(root: Path = ROOT) -> dict[str, set[str]]:
    """Which modules of the library each of its modules imports."""
    return own_imports(MODULES if root == ROOT else library(root))


def broken_floors(root: Path = ROOT) -> list[str]:
    modules = MODULES if root == ROOT else library(root)
    return [
        f"{name} imports {imported}"
        for name, targets in sorted(imports_of(root).items())
        for imported in sorted(targets)
        if modules[imported].floor not in MAY_IMPORT[modules[name].floor] and imported != "toolroll"
    ]


# --- who imports whom ------------------------------------------------------------------------------------------------


def test_each_floor_imports_only_the_floors_below_it() -> None:
    assert broken_floors() == []


def test_no_floor_imports_the_facade() -> None:
    """The façade imports everything: a module that imports it would be above itself."""
    assert [name for name, targets in imports_of().items() if "toolroll" in targets] == []


def test_an_import_upwards_is_found(tmp_path: Path) -> None:
    for floor in FLOORS:
        (tmp_path / floor).mkdir()
    (tmp_path / "agents" / "player.py").write_text("from toolroll.rollout.session.session import Session\n")
    (tmp_path / "rollout" / "session.py").write_text("def late():\n    from toolroll.agents.player import Session\n")
    (tmp_path / "parsers" / "base.py").write_text("import toolroll.rollout.session.session\n")
    assert broken_floors(tmp_path) == [
        "toolroll.parsers.base imports toolroll.rollout.session.session",
        "toolroll.rollout.session.session imports toolroll.agents.player",
    ]
    assert a_cycle(imports_of(tmp_path)) == [
        "toolroll.rollout.session.session",
        "toolroll.agents.player",
        "toolroll.rollout.session.session",
    ]


def test_there_are_no_import_cycles() -> None:
    """Imports inside functions count as well: a cycle that is hidden in one is still a cycle."""
    assert a_cycle(imports_of()) == []


def test_rollout_reaches_agents_by_entry_point_only() -> None:
    """No module below names one above as text either, as in `import_module("toolroll.agents.environments.desk")`."""
    for module in MODULES.values():
        above = {"parsers": ("rollout", "agents"), "rollout": ("agents",)}.get(module.floor, ())
        for floor in above:
            assert f'"toolroll.{floor}.' not in module.text, f"{module.name} names toolroll.{floor}"


def test_types_and_errors_stand_on_nothing_of_the_rollout() -> None:
    assert imports_of()["toolroll.rollout.errors"] == set()
    assert imports_of()["toolroll.rollout.types"] == {"toolroll.parsers.types"}
    assert imports_of()["toolroll.parsers.types"] == set()


INSIDE_ROLLOUT = [
    ("toolroll.rollout.engine", ("template", "session", "served", "dialogue", "runner", "store", "server", "adapters", "cli")),
    ("toolroll.rollout.template", ("engine", "session", "served", "dialogue", "runner", "store", "server", "adapters", "cli")),
    ("toolroll.rollout.session.session", ("engine", "template", "served", "dialogue", "runner", "store", "server", "adapters", "cli")),
    ("toolroll.rollout.model.model", ("dialogue", "runner", "store", "server", "adapters", "cli")),
    ("toolroll.rollout.model.conversation", ("runner", "store", "server", "adapters", "cli")),
    ("toolroll.rollout.runs.runner", ("server", "adapters", "cli")),
]


def test_the_floors_inside_rollout() -> None:
    for below, above in INSIDE_ROLLOUT:
        forbidden = tuple(f"toolroll.rollout.{name}" for name in above)
        for name, targets in imports_of().items():
            if name == below or name.startswith(f"{below}."):
                wrong = [target for target in targets if any(target == stop or target.startswith(f"{stop}.") for stop in forbidden)]
                assert wrong == [], f"{name} imports {wrong}"


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
    checks = {f"{template}{name}" for name in ("verify", "reference", "shown")}
    assert {name for name in reached if name.startswith(template)} == checks


def test_the_three_folders_are_no_packages() -> None:
    """An `agents/__init__.py` at the top would shadow openai-agents for whoever runs from the repository's root."""
    for floor in FLOORS:
        assert not (ROOT / floor / "__init__.py").exists()
        assert (ROOT / floor / "py.typed").is_file()
        link = ROOT / "src" / "toolroll" / floor
        assert link.is_symlink() and link.resolve() == ROOT / floor


# --- what is public --------------------------------------------------------------------------------------------------


def test_every_public_name_resolves() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", ())
        assert len(set(public)) == len(public), f"{name}: a name stands in __all__ twice"
        assert [entry for entry in public if not hasattr(module, entry)] == [], name


def test_a_package_that_re_exports_says_so() -> None:
    silent = []
    for module in MODULES.values():
        if module.path.name == "__init__.py" and any(entry.startswith("toolroll.") for entry, _ in module.imports()):
            silent += [module.name] * (not getattr(importlib.import_module(module.name), "__all__", ()))
    assert silent == [], "these packages re-export names without an __all__"


def test_the_facade_names_each_home_once_and_for_the_type_checker() -> None:
    import toolroll

    homes = toolroll._HOME_OF
    assert sorted(homes) == sorted(toolroll.__all__)
    checked = {
        entry.rpartition(".")[2]: entry.rpartition(".")[0] for entry, _ in MODULES["toolroll"].imports() if "toolroll." in entry
    }
    assert checked == homes
    assert dir(toolroll) == sorted(toolroll.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = toolroll.Nothing
