"""SkyRL's and AReaL's own base classes and types, beside the adapters."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import areal_mirror
from support.bare import run_apart
from support.framework_engines import GenerationHyperparameters, ModelResponse, install_areal
from support.trainer_source import theirs

from toolroll.rollout.adapters.areal.workflow import ArealEngine
from toolroll.rollout.types import GenerateRequest

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
optional = {"trajectory_time_splits", "rollout_sample_support"}  # of SkyRL 0.4
left_out = set(GeneratorOutput.__annotations__) - set(own._output([], {}, with_logprobs=True))
assert left_out in (set(), optional)
"""

_SKYRL_BATCH = """
bare("skyrl", "skyrl.train", "skyrl.train.dataset", "skyrl.train.generators", "skyrl.backends",
     "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils",
     "skyrl.backends.skyrl_train.inference_servers")
import torch
from types import SimpleNamespace
sys.modules["jaxtyping"] = SimpleNamespace(Bool=dict, Float=dict, Integer=dict)  # for annotations
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators import base
from support.framework_engines import GeneratorConfig, SkyrlClient
from toolroll.rollout.adapters.episodes import EpisodeSettings
from toolroll.rollout.adapters.sequences import TrainingSequence
from toolroll.rollout.adapters.skyrl import ToolrollGenerator, generator
from toolroll.rollout.testing import load_embedded_tokenizer

config = GeneratorConfig(inference_engine=SimpleNamespace(enable_return_routed_experts=True))
own = ToolrollGenerator(
    config, load_embedded_tokenizer(), SkyrlClient("", experts=True), EpisodeSettings(env="desk")
)
own._players = SimpleNamespace(get=lambda client: SimpleNamespace(
    model=SimpleNamespace(engine=SimpleNamespace(experts_shape=(2, 2)))))
rows = [[[[7, token], [token, 1]] for token in range(count)] for count in (6, 4)]
generator.routed_experts = lambda sequence, shape: torch.tensor(rows[sequence]).int().numpy()
output = convert_prompts_responses_to_batch_tensors(
    type("Tokenizer", (), {"pad_token_id": 0, "__int__": lambda self: 0})(),
    [[1, 2, 3], [4, 5]], [[6, 7, 8, 9], [6, 7, 8]], [[0.0] * 4, [0.0] * 3], [[1] * 4, [1] * 3],
    rollout_expert_indices=own._experts([0, 1]),
)
if "rollout_sample_support" in base.GeneratorOutput.__annotations__:  # packed, of SkyRL 0.4
    experts = output[-2].values
    assert experts[:6].tolist() == rows[0] and experts[7:11].tolist() == rows[1]
else:
    experts = output[-1]
    # a row at its token's position; the second sequence is padded on the left, and the last token
    # of each has no row
    assert experts[0, :6].tolist() == rows[0] and not experts[0, 6].any()
    assert experts[1, 2:6].tolist() == rows[1] and not experts[1, [0, 1, 6]].any()
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
    ("skyrl", "0.3.0", _SKYRL), ("skyrl", "0.3.0", _SKYRL_BATCH), ("areal", "1.0.4", _AREAL),
])  # fmt: skip
def test_a_trainer_takes_it_as_its_own(package: str, version: str, code: str) -> None:
    if find_spec(package) is None or find_spec("torch") is None:
        pytest.skip(f"pip install --no-deps {package}=={version}, and torch for the CPU")
    run_apart(code)


async def test_areal_s_client_names_the_adapter_and_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = theirs("areal/api/io_struct.py", "get_versioned_lora_name")
    build = theirs(
        "areal/engine/sglang_remote.py",
        "SGLangBackend.build_generation_request",
        get_versioned_lora_name=name,
        HttpRequest=SimpleNamespace,
    )
    install_areal(monkeypatch)
    asked: list[Any] = []

    async def agenerate(req: Any) -> ModelResponse:
        asked.append(req)
        return ModelResponse(output_tokens=[5], output_logprobs=[-1.0], output_versions=[3])

    gconfig = GenerationHyperparameters(lora_name="agent")
    inference = SimpleNamespace(agenerate=agenerate)
    engine = ArealEngine(inference, gconfig, [None] * 9, context_length=None)
    prompt = np.array([1, 2], dtype=np.int32)
    await engine.generate(GenerateRequest(prompt, {"max_new_tokens": 4}, "s"))
    payload = build(None, asked[0], with_lora=True, version=3).payload
    assert (payload["lora_path"], payload["input_ids"]) == ("agent-v3", [1, 2])


def test_areal_normalizes_groups_as_its_mirror_does() -> None:
    torch = pytest.importorskip("torch")
    made = theirs(
        "areal/utils/data.py", "Normalization", torch=torch, np=np, dist=torch.distributed
    )
    config = type("NormConfig", (), {})()
    vars(config).update(mean_level="group", mean_leave1out=False, std_level="group", eps=1e-5)
    vars(config).update(std_unbiased=True, group_size=4)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.5])
    assert torch.equal(made(config)(rewards), areal_mirror.normalized(rewards, 4))


async def test_areal_groups_episodes_as_its_mirror_does(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("areal.experimental.openai")
    vars(module)["InteractionWithTokenLogpReward"] = type("InteractionWithTokenLogpReward", (), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own = theirs(
        "areal/infra/remote_inf_engine.py",
        "GroupedRolloutWorkflow",
        asyncio=asyncio,
        concat_padded_tensors=list,
        RolloutWorkflow=object,
    )

    class Episodes:
        def __init__(self, results: list[Any]) -> None:
            self.left = iter(results)

        async def arun_episode(self, engine: Any, data: Any) -> Any:
            result = next(self.left)
            if isinstance(result, Exception):
                raise result
            return result

    logger = type("Logger", (), {"warning": lambda *words: None})()
    for results in ([1, 2, 3], [1, None, 3], [None, None, None], [1, ValueError("aborted"), 3]):
        grouped = [
            await areal_mirror.execute(workflow, None, {})
            for workflow in (
                own(Episodes(results), 3, logger),
                areal_mirror.GroupedRolloutWorkflow(Episodes(results), 3),
            )
        ]
        assert grouped[0] == grouped[1]
