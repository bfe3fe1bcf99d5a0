"""SkyRL's and AReaL's own base classes and types, beside the adapters."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import areal
from support.bare import run_apart

from toolroll.rollout.types import GenerateRequest
from toolroll.trainers.areal.workflow import ArealEngine

_SKYRL_BATCH = """
bare("skyrl", "skyrl.train", "skyrl.train.dataset", "skyrl.train.generators", "skyrl.backends",
     "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils",
     "skyrl.backends.skyrl_train.inference_servers")
import torch
from types import SimpleNamespace
absent("jaxtyping")  # for annotations
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators import base
from support.framework_engines import GeneratorConfig, SkyrlClient
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.sequences import TrainingSequence
from toolroll.trainers.skyrl import ToolrollGenerator, generator
from toolroll.testing import load_embedded_tokenizer

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
from toolroll.trainers.areal import ToolrollWorkflow

assert issubclass(ToolrollWorkflow, RolloutWorkflow)
assert not issubclass(dict, RolloutWorkflow)
"""


@pytest.mark.parametrize(("package", "version", "code"), [
    ("skyrl", "0.3.0", _SKYRL_BATCH), ("areal", "1.0.4", _AREAL),
])  # fmt: skip
def test_a_trainer_takes_it_as_its_own(package: str, version: str, code: str) -> None:
    if find_spec(package) is None or find_spec("torch") is None:
        pytest.skip(f"pip install --no-deps {package}=={version}, and torch for the CPU")
    run_apart(code)


async def test_areal_s_client_names_the_adapter_and_its_version() -> None:
    backend = areal.real("areal.engine.sglang_remote").SGLangBackend()
    answer = areal.real("areal.api").ModelResponse(
        output_tokens=[5], output_logprobs=[-1.0], output_versions=[3]
    )
    asked: list[Any] = []

    async def agenerate(req: Any) -> Any:
        asked.append(req)
        return answer

    inference = SimpleNamespace(agenerate=agenerate)
    engine = ArealEngine(
        inference, areal.gconfig(lora_name="agent"), [None] * 9, context_length=None
    )
    prompt = np.array([1, 2], dtype=np.int32)
    await engine.generate(GenerateRequest(prompt, {"max_new_tokens": 4}, "s"))
    payload = backend.build_generation_request(asked[0], with_lora=True, version=3).payload
    assert (payload["lora_path"], payload["input_ids"]) == ("agent-v3", [1, 2])
