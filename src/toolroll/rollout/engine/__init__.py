"""The client of SGLang's `/generate`."""

from toolroll.rollout.engine.admission import Admission
from toolroll.rollout.engine.client import ROUTING_KEY, Engine
from toolroll.rollout.engine.engine_client import EncodedRequest, EngineClient
from toolroll.rollout.engine.engine_config import EngineConfig
from toolroll.rollout.engine.health import Health
from toolroll.rollout.engine.model_info import ModelInfo
from toolroll.rollout.engine.response import parse_completion
from toolroll.rollout.engine.resume import (
    PARKING,
    Parking,
    cut_placeholder,
    generate_resumed,
    is_cut,
)
from toolroll.rollout.engine.sampling_params import effective_params, request_fields
from toolroll.rollout.engine.stream import Progress
from toolroll.rollout.runtime.param_names import LORA_PATH

__all__ = [
    "LORA_PATH",
    "PARKING",
    "ROUTING_KEY",
    "Admission",
    "EncodedRequest",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "Health",
    "ModelInfo",
    "Parking",
    "Progress",
    "cut_placeholder",
    "effective_params",
    "generate_resumed",
    "is_cut",
    "parse_completion",
    "request_fields",
]
