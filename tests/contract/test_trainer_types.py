"""SkyRL's and AReaL's own base classes and types, beside the adapters."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from support.bare import run_apart

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
    run_apart(code)
