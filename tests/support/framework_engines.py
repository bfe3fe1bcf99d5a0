"""The engine object of SkyRL 0.3.0 with the embedded engine behind it, and the types of SkyRL that
the adapter reads: names, fields and defaults.
"""

from dataclasses import dataclass, field
from typing import Any

from support.experts import sent_experts
from support.standins import recorded_class, stands_for
from support.wire import generate, sglang_names

_CONFIG = "skyrl.train.config.config"
SkyrlSamplingParams = recorded_class(f"{_CONFIG}:SamplingParams")
SkyrlChatTemplate = recorded_class(f"{_CONFIG}:ChatTemplateConfig")
TrajectoryID = recorded_class("skyrl.train.generators.base:TrajectoryID")
_Returned = recorded_class(f"{_CONFIG}:InferenceEngineConfig", "enable_return_routed_experts")


@stands_for(f"{_CONFIG}:InferenceEngineConfig", own="__init__ enable_return_sample_support_set")
@dataclass
class SkyrlInference(_Returned):  # type: ignore[misc, valid-type]
    """Of SkyRL's `InferenceEngineConfig`, what an engine returns."""

    enable_return_sample_support_set: bool = False  # of SkyRL 0.4


GeneratorConfig = recorded_class(
    f"{_CONFIG}:GeneratorConfig",
    inference_engine=SkyrlInference,
    chat_template=SkyrlChatTemplate,
    sampling_params=SkyrlSamplingParams,
)


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
        experts = [sent_experts(sampled.body).tolist()] if self.experts else None
        return {
            "responses": [sampled.body["text"]],
            "response_ids": [sampled.output_ids],
            "stop_reasons": [sampled.reason],
            "response_logprobs": [sampled.logprobs],
            "prompt_logprobs": None,
            "rollout_expert_indices": experts,
        }
