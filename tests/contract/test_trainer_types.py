"""SkyRL's and AReaL's own base classes and types, beside the adapters."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

_STUBS = """
import importlib.util, sys, types
from pathlib import Path

def bare(top, *names):
    "Make packages importable without their __init__, which draws engines and CUDA."
    folder = Path(importlib.util.find_spec(top).submodule_search_locations[0])
    for name in (top, *names):
        module = types.ModuleType(name)
        module.__path__ = [str(folder.parent.joinpath(*name.split(".")))]
        sys.modules[name] = module
"""

_SKYRL = """
bare("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.train",
     "skyrl.backends.skyrl_train.inference_servers", "skyrl.train.generators")
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput
from support.framework_engines import GeneratorConfig, SkyrlClient
from toolroll.rollout.adapters.episodes import EpisodeSettings
from toolroll.rollout.adapters.skyrl import ToolrollGenerator
from toolroll.rollout.testing import load_embedded_tokenizer

own = ToolrollGenerator(
    GeneratorConfig(), load_embedded_tokenizer(), SkyrlClient(""), EpisodeSettings(env="desk")
)
assert isinstance(own, GeneratorInterface)
assert not issubclass(dict, GeneratorInterface)
assert set(own._output([], {}, with_logprobs=True)) == set(GeneratorOutput.__annotations__)
"""

_AREAL = """
bare("areal", "areal.api")
from areal.api.workflow_api import RolloutWorkflow
from support.framework_engines import GenerationHyperparameters
from toolroll.rollout.adapters.areal import ToolrollWorkflow
from toolroll.rollout.adapters.episodes import EpisodeSettings
from toolroll.rollout.testing import load_embedded_tokenizer

own = ToolrollWorkflow(
    GenerationHyperparameters(), load_embedded_tokenizer(), EpisodeSettings(env="desk")
)
assert isinstance(own, RolloutWorkflow)
assert not issubclass(dict, RolloutWorkflow)
"""


@pytest.mark.parametrize(("package", "version", "code"), [
    ("skyrl", "0.3.0", _SKYRL), ("areal", "1.0.4", _AREAL),
])  # fmt: skip
def test_a_trainer_takes_it_as_its_own(package: str, version: str, code: str) -> None:
    if find_spec(package) is None or find_spec("torch") is None:
        pytest.skip(f"pip install --no-deps {package}=={version}, and torch for the CPU")
    paths = f"import sys; sys.path[:] = {sys.path!r}\n"
    subprocess.run([sys.executable, "-c", paths + _STUBS + code], check=True)
