"""No stand-in for another package's classes, functions or modules says more than the package.

What is recorded of the packages is compared with them in tests/contract/test_standins.py.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support import standins
from support.inventory import entry_of
from support.standins import CLAIMS, TESTS, Claim, faults

from toolroll.agents.environments.tau_bench.package import import_module

SUPPORT = TESTS / "support"
MIRRORS = [*sorted(path.stem for path in SUPPORT.glob("*_mirror.py")), "framework_engines"]
OWN = {
    "miles_mirror.install": "installs the mirror",
    "slime_mirror.eval_dataset": "makes a dataset",
    "slime_mirror.flattened": "slime's statements, which are no function of their own",
    "slime_mirror.install": "installs the mirror",
    "slime_mirror.install_hooks": "installs a function of a test",
    "slime_mirror.install_loop": "installs the mirror",
    "slime_mirror.play_group": "slime's statements, played in tests with the marker `peers` too",
    "slime_mirror.put_back": "slime's statements, played in tests with the marker `peers` too",
    "slime_mirror.train_data": "checks samples",
    "tinker_mirror.importance_sampling": "the loss of Tinker's documentation",
    "tinker_mirror.is_old": "looks at the version",
    "trl_mirror.a_trainer": "`named`",
    "trl_mirror.an_async_config": "`named`",
    "verl_mirror.Keys": "a configuration's mapping",
    "verl_mirror.install": "installs the mirror",
    "verl_mirror.loop_arguments": "compared with verl's configuration in test_verl.py",
    "vllm_mirror.asked_params": "OpenRLHF's values",
}
"""What else the mirrors define, and why `stands_for` does not mark it."""
NOT_COMPARED = {
    "contract/test_gradients_peers.py": "a class of verifiers without what prime-rl reads of it",
    "support/bare.py": "the package's own files",
    "support/published_example.py": "the example's own files, and our module in place of its own",
    "support/standins.py": "compares",
    "support/stubs/absent.py": "names to import; a call raises, or decorates a kernel for GPUs",
}
"""Files that put other modules into `sys.modules`, and why these need no comparison."""
STUBS = {"sgl_kernel", "torchvision", "triton"}
"""Packages without a wheel for this machine: SGLang imports names of theirs, and calls none."""
OTHERS = {"absent", "forked_sglang"}
"""What stubs share, and a command that starts the real package."""


_CALLS = (
    "sys.meta_path.", "sys.modules.update", "sys.modules.setdefault", "ModuleType",
    "types.ModuleType",
)  # fmt: skip
_WRITES = re.compile(r"^\s*sys\.modules\[.*\]\S* = (?!None)", re.MULTILINE)


def unmarked(name: str) -> list[str]:
    """The public classes and functions that a mirror defines without `stands_for`."""
    mirror = importlib.import_module(f"support.{name}")
    return [
        each
        for each, value in vars(mirror).items()
        if getattr(value, "__module__", "") == mirror.__name__
        and not each.startswith("_")
        and id(value) not in CLAIMS
    ]


def test_what_the_mirrors_define_is_compared_or_listed() -> None:
    assert {f"{name}.{each}" for name in MIRRORS for each in unmarked(name)} == OWN.keys()
    stubs = {path.name.removesuffix(".py") for path in (SUPPORT / "stubs").iterdir()}
    assert stubs - {"__pycache__"} == STUBS | OTHERS


def test_every_module_that_a_test_puts_in_place_is_compared() -> None:
    """All that writes to `sys.modules` goes through `stand_in`, or is listed."""
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    writing = {
        path.relative_to(TESTS).as_posix()
        for path, text in texts.items()
        if re.search(r"sys\.(modules|meta_path)|ModuleType", text) and list(writes(ast.parse(text)))
    }
    assert writing == NOT_COMPARED.keys()


def writes(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements that put a module, or a name of one, into `sys.modules`; also in code that is a
    string. None stands for a module that is not installed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            none = isinstance(node.value, ast.Constant) and node.value.value is None
            kept = not none or any(isinstance(one, ast.Attribute) for one in node.targets)
            if kept and any(_of_modules(one) for one in node.targets):
                yield node
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = [ast.unparse(one) for one in node.args]
            item = called.endswith("setitem") and given[0] == "sys.modules" and given[2] != "None"
            if item or called.startswith(_CALLS):
                yield node
        elif isinstance(node, ast.Constant) and _WRITES.search(str(node.value)):
            yield node


def _of_modules(target: ast.AST) -> bool:
    while isinstance(target, ast.Attribute | ast.Subscript):
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "sys.modules":
            return True
        target = target.value
    return False


@pytest.mark.parametrize("name", ["types", "envs", "envs.base", "envs.user"])
def test_the_small_tau_bench_says_no_more_than_tau_bench(name: str) -> None:
    module = import_module(f"support.tau_mini.{name}")  # without litellm
    own = {"Env": "__init__"}
    for made, value in vars(module).items():
        if getattr(value, "__module__", "") == module.__name__:
            Claim(value, f"tau_bench.{name}:{made}", own.get(made, "")).check()


# --- the comparison -------------------------------------------------------------------------------

REAL = """
class Client:
    limit: int
    names: list = field(default_factory=list)
    size: int = 3
    async def ask(self, ids, *, seed=None, **more): ...
    def close(self): ...
"""


@pytest.mark.parametrize(("wrong", "word"), [
    ("async def ask(self, ids, *, seed=None): ...", ""),
    ("async def ask(self, ids, *, extra=1): ...", "(extra): the package has no such parameter"),
    ("def ask(self, ids): ...", "async"),
    ("async def ask(self): ...", "needs ['ids']"),
    ("async def ask(self, tokens): ...", "(tokens): the package has no such parameter"),
    ("async def ask(self, ids, seed): ...", "(seed): not at the package's position"),
    ("async def ask(self, ids, *, seed=3): ...", "(seed): None in the package, here 3"),
    ("async def ask(self, ids=()): ...", "(ids): the package has no default"),
    ("def open(self): ...", "open: the package has no such member"),
    ("close = 1", "close: a method in one"),
    ("def close(self, **more): ...", "takes no ['**']"),
    ("size: int = 4", "size: 3 in the package, here 4"),
    ("size: int = 3", "needs ['limit']"),
    ("limit: int\n    names: list = field(default_factory=dict)", "names: [] in the package"),
    ("limit: int\n    names: list = field(default_factory=list)", ""),
])  # fmt: skip
def test_what_the_comparison_finds(wrong: str, word: str) -> None:
    ours, theirs = (
        entry_of(ast.parse(text).body[0]) for text in (f"class Client:\n    {wrong}", REAL)
    )
    found = faults("Client", ours, theirs)
    assert any(word in one for one in found) if word else found == []


def test_a_wrong_module_or_a_lambda_is_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror: Any = importlib.import_module("support.slime_mirror")
    with pytest.raises(AssertionError, match=r"slime\.types:Sample is not recorded"):
        standins.stand_in(monkeypatch, {"slime.types": {"Sample": mirror.Sample}})
    with pytest.raises(AssertionError, match="write the stand-in"):
        standins.stand_in(monkeypatch, {"wandb": {"init": lambda project=None: None}})
    with pytest.raises(AssertionError, match=r"Accelerator has no \['rank'\]"):
        standins.named("accelerate:Accelerator", rank=0)
