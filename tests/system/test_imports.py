"""What a fresh interpreter loads when it imports the library, and which packages it finds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.processes import printed
from support.source import ROOT, library
from support.tau import BOTH, MINI, TauBench, needed

MODULES = library()
TESTS = ROOT / "tests"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS)}

# Each costs a second or more, pulls in a CUDA stack, or is in an extra: imported at first use,
# never earlier.
HEAVY = (
    "torch", "sglang", "transformers", "triton", "xgrammar", "pandas", "datasets", "bfcl_eval",
    "tau_bench", "litellm", "slime",
    "verl", "ray", "httpx", "openai",
)  # fmt: skip


def heavy_after(*modules: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after importing `modules`."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {list(modules)!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {list(HEAVY)!r} if name in sys.modules]))"
    )
    return list(json.loads(printed("-c", code).splitlines()[-1]))


def test_the_facade_loads_nothing_of_its_own_at_import() -> None:
    code = (
        "import sys, toolroll; print(sorted(name for name, module in sys.modules.items()"
        " if name.startswith('toolroll.') and getattr(module, '__file__', None)))"
    )
    assert printed("-c", code).strip() == "[]"


NEED_OPENAI = (
    "toolroll.endpoint.in_process",
    "toolroll.trainers.atropos",
    "toolroll.trainers.openrlhf",
    "toolroll.trainers.verifiers",
)
"""They subclass the OpenAI SDK's client, or classes of a trainer that imports the SDK or httpx."""


def test_no_module_of_the_library_loads_a_heavy_package() -> None:
    assert heavy_after(*(name for name in MODULES if not name.startswith(NEED_OPENAI))) == []


def test_using_a_public_name_loads_nothing_heavy() -> None:
    """Every name of the façade, resolved in one fresh interpreter."""
    code = (
        "import json, sys, toolroll\n"
        "for name in toolroll.__all__: getattr(toolroll, name)\n"
        f"print(json.dumps([name for name in {list(HEAVY)!r} if name in sys.modules]))"
    )
    assert json.loads(printed("-c", code).splitlines()[-1]) == []


def test_the_measurement_sees_a_heavy_import() -> None:
    assert "transformers" in heavy_after("transformers")


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("toolroll.cli.app", {"aiohttp", "jinja2", "jsonschema_rs", "numpy", "transformers"}),
        ("toolroll, toolroll.agents, toolroll.parsers", {"transformers", "torch", "numpy"}),
    ],
    ids=["the help of the command", "the names of packages"],
)
def test_an_import_does_not_load_what_comes_later(imported: str, absent: set[str]) -> None:
    code = f"import sys, {imported}; print(*{absent} & set(sys.modules))"
    assert printed("-c", code).split() == []


def test_the_folders_shadow_no_package_of_their_name(tmp_path: Path) -> None:
    """openai-agents installs a package `agents`, which comes before ours in the repository."""
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("mine = True\n", encoding="utf-8")
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]"
    assert printed("-c", f"{path}; import agents; print(agents.mine)").strip() == "True"


def test_neither_wheel_is_imported() -> None:
    code = (
        "import sys; from support.qwen import *; qwen3_tokenizer(); print(*{'trl', 'dashscope'} "
        "& set(sys.modules))"
    )
    assert printed("-c", code, cwd=TESTS, env=ENVIRONMENT) == "\n"


def test_d11_an_import_sets_up_no_logging() -> None:
    code = (
        "import logging, toolroll.endpoint, toolroll.trainers.openrlhf as o; "
        "assert not logging.getLogger().handlers"
    )
    printed("-c", code)


_IMPORT = """
import os, sys
def no_network(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise SystemExit(f"network: {args}")
sys.addaudithook(no_network)
before = dict(os.environ)
from support.tau import MINI, REAL
from support.patience import PATIENCE
tau = {"mini": MINI, "real": REAL}[sys.argv[1]]
factory = tau.factory()
assert tau.package + ".envs" not in sys.modules, "imported before it was asked for"
factory.tasks("test")
assert tau.package + ".envs.user" in sys.modules
assert "litellm" not in sys.modules, "the stand-in was left behind"
assert dict(os.environ) == before
"""


@pytest.mark.parametrize("tau", BOTH)
def test_tau_bench_is_imported_late_without_litellm_and_without_network(tau: TauBench) -> None:
    needed(tau)
    printed("-c", _IMPORT, "mini" if tau is MINI else "real", env=ENVIRONMENT)
