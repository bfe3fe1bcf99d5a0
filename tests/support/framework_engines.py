"""The engine object of SkyRL 0.3.0 with the embedded engine behind it, and the types of SkyRL that
the adapter reads: names, fields and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.experts import sent_experts
from support.generate import generate, sglang_names
from support.standins import stands_for


@stands_for("skyrl.train.config.config:SamplingParams")
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


@stands_for("skyrl.train.config.config:ChatTemplateConfig")
@dataclass
class SkyrlChatTemplate:
    """SkyRL's `ChatTemplateConfig`."""

    source: str = "name"
    name_or_path: str | None = None


@stands_for(
    "skyrl.train.config.config:InferenceEngineConfig",
    own="__init__ enable_return_sample_support_set",
)
@dataclass
class SkyrlInference:
    """Of SkyRL's `InferenceEngineConfig`, what an engine returns."""

    enable_return_routed_experts: bool = False
    enable_return_sample_support_set: bool = False  # of SkyRL 0.4


@stands_for("skyrl.train.config.config:GeneratorConfig")
@dataclass
class GeneratorConfig:
    """SkyRL's `GeneratorConfig`."""

    inference_engine: Any = field(default_factory=SkyrlInference)
    n_samples_per_prompt: int = 5
    batched: bool = False
    max_turns: int = 1
    max_input_length: int | None = None
    chat_template: SkyrlChatTemplate = field(default_factory=SkyrlChatTemplate)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling_params: SkyrlSamplingParams = field(default_factory=SkyrlSamplingParams)
    use_conversation_multi_turn: bool = True
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    eval_sampling_params: SkyrlSamplingParams | None = None
    eval_n_samples_per_prompt: int = 1
    zero_reward_on_non_stop: bool = False
    use_cache_salt: bool = True
    apply_overlong_filtering: bool = False
    step_wise_trajectories: bool = False
    vision_language_generator: bool = False
    merge_stepwise_output: bool = False


@stands_for("skyrl.train.generators.base:TrajectoryID")
@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


@stands_for(
    "skyrl.backends.skyrl_train.inference_servers.remote_inference_client:RemoteInferenceClient",
    own="__init__ url experts seen models",
)
@dataclass
class SkyrlClient:
    """SkyRL's `RemoteInferenceClient`. `experts`: with `enable_return_routed_experts`."""

    url: str
    weight_version: int | None = 0
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
        sampled = await generate(
            self.url,
            input_batch["prompt_token_ids"][0],
            sglang_names(params),
            input_batch["session_ids"][0],
            return_routed_experts=self.experts,
        )
        experts = [sent_experts(sampled.answer).tolist()] if self.experts else None
        return {
            "responses": [sampled.answer["text"]],
            "response_ids": [sampled.ids],
            "stop_reasons": [sampled.reason],
            "response_logprobs": [sampled.logprobs],
            "prompt_logprobs": None,
            "rollout_expert_indices": experts,
        }
