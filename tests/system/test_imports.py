"""What a fresh interpreter loads and prints when it imports the library, and that the core plays
an episode without the packages around it."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.episodes import call
from support.processes import printed, python
from support.source import AROUND, ROOT, library
from support.tau import BOTH, MINI, TauBench, needed

from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, serve_in_thread

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}

# Each costs a second or more, pulls in a CUDA stack, or is in an extra: imported at first use,
# never earlier.
HEAVY = (
    "torch", "sglang", "transformers", "triton", "xgrammar", "pandas", "datasets", "bfcl_eval",
    "tau_bench", "litellm", "slime",
    "verl", "ray", "httpx", "openai",
)  # fmt: skip
NEED_OPENAI = (
    "toolroll.endpoint.in_process",
    "toolroll.trainers.atropos",
    "toolroll.trainers.openrlhf",
    "toolroll.trainers.verifiers",
)
"""They subclass the OpenAI SDK's client, or classes of a trainer that imports the SDK or httpx."""
MODULES = list(library())
LIGHT = [name for name in MODULES if not name.startswith(NEED_OPENAI)]


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (f"import {', '.join(LIGHT)}", HEAVY),
        ("import toolroll; [getattr(toolroll, name) for name in toolroll.__all__]", HEAVY),
        ("import toolroll", MODULES[1:]),
        ("import toolroll.cli.app", ("aiohttp", "jinja2", "jsonschema_rs", "numpy", *HEAVY)),
        ("import toolroll.agents, toolroll.parsers", ("numpy", *HEAVY)),
        ("import support.qwen; support.qwen.qwen3_tokenizer()", ("trl", "dashscope")),
        ("import toolroll.trainers.openrlhf", ("torch",)),
    ],
    ids=["modules", "public", "facade", "help of the command", "packages", "wheels", "openrlhf"],
)
def test_an_import_loads_nothing_early_and_sets_up_no_logging(
    code: str, absent: Sequence[str]
) -> None:
    """Which of `absent` a fresh interpreter has after `code`."""
    code = f"import logging, sys; {code}; assert not logging.getLogger().handlers"
    code += f"; print(*(name for name in {absent} if name in sys.modules))"
    assert printed("-c", code, env=ENVIRONMENT).split() == []


def test_no_notice_about_pytorch_is_printed() -> None:
    environment = {**os.environ, "USE_TORCH": "0"}
    environment.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    missing = "import sys; sys.modules['torch'] = None"  # as if it were not installed
    ours = "from toolroll.rollout.model.tokenizers import load_tokenizer as load; load('embedded')"
    check = "import transformers; assert not transformers.is_torch_available()"
    quiet, noisy = (
        python("-c", f"{missing}; {first}; {check}", env=environment, check=True)
        for first in (ours, "import transformers")
    )
    assert (quiet.stdout, quiet.stderr) == ("", "")
    assert "PyTorch was not found" in noisy.stderr  # else this test proves nothing


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
def test_tau_bench_is_imported_late_without_litellm_or_network(tau: TauBench) -> None:
    needed(tau)
    printed("-c", _IMPORT, "mini" if tau is MINI else "real", env=ENVIRONMENT)


_ALONE = '''
import asyncio, importlib, json, pkgutil, sys

import toolroll
from toolroll import Model, RolloutArgs, TrainableToolCallingAgent, tool_environment
from toolroll.rollout.environment import EnvironmentOptions

folder, url = sys.argv[1:]
assert toolroll.__file__.startswith(folder), toolroll.__file__
for module in pkgutil.walk_packages(toolroll.__path__, "toolroll."):
    if module.name != "toolroll.__main__":  # starts the command
        importlib.import_module(module.name)


def look(key: str) -> str:
    """Look at something.

    Args:
        key: Its name.
    """
    return f"the {key} is open"


async def main() -> None:
    environment = tool_environment(
        tools=[look],
        tasks=[{"prompt": "Is the door open?"}],
        reward=lambda final: float("open" in final),
    )
    args = RolloutArgs(engine=url, model="embedded", parser="hermes")
    async with Model.from_args(args) as model:
        agent = TrainableToolCallingAgent(model=model)
        [task] = environment.tasks("test")
        result = await agent.asolve(environment.make(EnvironmentOptions()), task=task)
    assert (result.status.value, result.reward) == ("completed", 1.0), result
    mismatches = [name for name in result.metrics if name.startswith("token_mismatches")]
    assert not mismatches, mismatches
    [trajectory] = result.trajectories
    print(json.dumps([trajectory.input_ids.tolist(), trajectory.loss_mask.tolist()]))


asyncio.run(main())
'''


def test_the_core_plays_alone(tmp_path: Path) -> None:
    copy = tmp_path / "toolroll"
    shutil.copytree(ROOT / "src" / "toolroll", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for package in AROUND:
        shutil.rmtree(copy / package)
    replies = [call("look", key="door"), "It is open."]
    policy = lambda request: replies[request.call]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), policy)) as engine:
        out = printed("-c", _ALONE, tmp_path, engine.url, env=env, cwd=tmp_path)
    ids, mask = json.loads(out)
    first, second = engine.log
    assert ids == [*second.input_ids, *second.output_ids]
    sampled = len(first.output_ids) + len(second.output_ids)
    assert sum(mask) == sampled and mask[len(first.input_ids)] == mask[-1] == 1
