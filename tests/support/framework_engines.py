"""The engine objects of SkyRL 0.3.0 and AReaL 1.0.4 with the embedded engine behind them, and the
types of theirs that the adapters read: names, fields and defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest
from support.experts import sent_experts

_OURS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


async def _generate(
    url: str, input_ids: list[int], params: dict[str, Any], session: str, **fields: Any
) -> dict[str, Any]:
    body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True, **fields}
    headers = {"X-SMG-Routing-Key": session}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/generate", json=body, headers=headers) as response,
    ):
        answer: dict[str, Any] = await response.json()
    assert response.status == 200, answer
    return answer


# --- SkyRL ----------------------------------------------------------------------------------------


@dataclass
class SkyrlSamplingParams:
    """SkyRL's `SamplingParams`."""

    max_generate_length: int = 1024
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = -1
    logprobs: int | None = 1
    stop: list[str] | None = None
    additional_kwargs: dict[str, Any] | None = None


@dataclass
class GeneratorConfig:
    """Of SkyRL's `GeneratorConfig`, what a generator reads."""

    max_turns: int = 1
    max_input_length: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling_params: SkyrlSamplingParams = field(default_factory=SkyrlSamplingParams)
    zero_reward_on_non_stop: bool = False
    use_cache_salt: bool = True
    apply_overlong_filtering: bool = False
    step_wise_trajectories: bool = False
    vision_language_generator: bool = False
    merge_stepwise_output: bool = False
    inference_engine: Any = field(
        default_factory=lambda: SimpleNamespace(enable_return_routed_experts=False)
    )


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


@dataclass
class SkyrlClient:
    """SkyRL's `RemoteInferenceClient`. `without_logprobs`: as an engine that gives none. `experts`:
    with `enable_return_routed_experts`.
    """

    url: str
    weight_version: int | None = 0
    without_logprobs: bool = False
    uses_lora_weight_sync: bool = False
    experts: bool = False
    seen: list[dict[str, Any]] = field(default_factory=list)
    models: list[str | None] = field(default_factory=list)

    async def generate(self, input_batch: dict[str, Any], model: str | None = None) -> Any:
        if not model and self.uses_lora_weight_sync:
            raise ValueError("`model` is required when LoRA is enabled")
        self.seen.append(input_batch)
        self.models.append(model)
        params: dict[str, Any] = dict(input_batch["sampling_params"])
        params.pop("logprobs")
        answer = await _generate(
            self.url,
            input_batch["prompt_token_ids"][0],
            {_OURS.get(name, name): value for name, value in params.items()},
            input_batch["session_ids"][0],
            return_routed_experts=self.experts,
        )
        meta = answer["meta_info"]
        return {
            "responses": [answer["text"]],
            "response_ids": [answer["output_ids"]],
            "stop_reasons": [meta["finish_reason"]["type"]],
            "response_logprobs": None
            if self.without_logprobs
            else [[value for value, *_ in meta["output_token_logprobs"]]],
            "prompt_logprobs": None,
            "rollout_expert_indices": [sent_experts(answer).tolist()] if self.experts else None,
        }


# --- AReaL ----------------------------------------------------------------------------------------


@dataclass
class GenerationHyperparameters:
    """AReaL's, as far as a workflow reads it."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 65536
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 100_000_000
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0
    lora_name: str = ""
    use_beam_search: bool = False

    def new(self, **changed: Any) -> GenerationHyperparameters:
        return dataclasses.replace(self, **changed)


@dataclass
class ModelRequest:
    rid: str = ""
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: Any = None


@dataclass
class ModelResponse:
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"


@dataclass
class ArealInference:
    """AReaL's `InferenceEngine`. Each turn's last token has the next weight version."""

    url: str
    version: int = 3
    seen: list[ModelRequest] = field(default_factory=list)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.seen.append(req)
        config = req.gconfig
        params = {
            "max_new_tokens": config.max_new_tokens,
            "temperature": 0.0 if config.greedy else config.temperature,
            "stop_token_ids": config.stop_token_ids,
        }
        answer = await _generate(self.url, req.input_ids, params, req.rid)
        meta, ids = answer["meta_info"], answer["output_ids"]
        return ModelResponse(
            req.input_ids,
            ids,
            [value for value, *_ in meta["output_token_logprobs"]],
            [self.version] * (len(ids) - 1) + [self.version + 1] * bool(ids),
            meta["finish_reason"]["type"],
        )


def install_areal(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Make these types importable as AReaL. Return what is recorded as statistics."""
    recorded: dict[str, list[float]] = {}

    def scalar(**values: float) -> None:
        for name, value in values.items():
            recorded.setdefault(name, []).append(value)

    modules: dict[str, dict[str, Any]] = {
        "areal": {},
        "areal.api": {"ModelRequest": ModelRequest},
        "areal.utils": {},
        "areal.utils.stats_tracker": {"get": lambda scope: SimpleNamespace(scalar=scalar)},
        "areal.workflow_context": {"stat_scope": lambda: "rollout"},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return recorded
