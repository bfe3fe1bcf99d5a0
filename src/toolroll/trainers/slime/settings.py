"""`SlimeSettings`: toolroll's settings in slime's `args`. This module also reads the arguments of
slime that an episode needs.

Invariants: an attribute named `toolroll_*` that is not a setting is refused. The error names the
option of slime that decides it, or the most similar setting. Options of slime that toolroll does
not support are refused before the first episode.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Literal

from pydantic import Field

from toolroll.rollout.engine import LORA_PATH
from toolroll.rollout.errors import UsageError
from toolroll.rollout.settings import Affinity, RolloutArgs, RunSettings
from toolroll.trainers.episodes import EpisodeSettings

logger = logging.getLogger(__name__)

PREFIX = "toolroll_"

_DECIDED_BY = {
    "engine": "--sglang-router-ip and --sglang-router-port",
    "model": "--hf-checkpoint",
    "samples": "--n-samples-per-prompt",
    "sampling_params": "--rollout-temperature, --rollout-max-response-len ...",
    "temperature": "--rollout-temperature",
    "top_p": "--rollout-top-p",
    "top_k": "--rollout-top-k",
    "max_new_tokens": "--rollout-max-response-len",
    "stop": "--rollout-stop",
    "stop_token_ids": "--rollout-stop-token-ids",
    "sampling_seed": "--sglang-enable-deterministic-inference",
    "return_routed_experts": "--use-rollout-routing-replay",
    "tasks": "--prompt-data",
}
"""What is set with slime's own options, by toolroll's name."""

_NAMES_OF_OTHERS = frozenset({"chat_template", "seed", "split", "trust_remote_code"})
"""Settings whose names are also those of Megatron's arguments, in slime's `args`."""

_TEXT_ONLY = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
"""Sampling parameters of slime that affect only the text of an answer, which is not used here."""


def option_name(field: str) -> str:
    """Return the key of a field in slime's `args`."""
    return PREFIX + field


class SlimeSettings(EpisodeSettings):
    """The settings in slime's `args`. Set a field as the key `toolroll_<field>` in the file of
    --custom-config-path, which becomes an attribute of `args`.
    """

    workers: int = Field(
        default=1,
        ge=1,
        description="Play in this many processes of the trainer's Ray cluster; 1: in its own "
        "event loop.",
    )
    affinity: Affinity = 1
    partial: Literal["park", "restart"] | None = Field(
        default=None,
        description="After an abort by the trainer: keep the episode in the process and continue "
        "it when the trainer passes the sample again (park), or start it again (restart); default: "
        "park with --partial-rollout or slime's fully asynchronous rollout, otherwise restart.",
    )
    max_parked: int = Field(
        default=4096, ge=0, description="Maximum number of parked episodes; the oldest are dropped."
    )
    parked_timeout: float = Field(
        default=3600.0, gt=0, description="Seconds after which a parked episode is dropped."
    )
    max_weight_versions: int | None = Field(
        default=None,
        ge=1,
        description="A parked episode with tokens of this many weight versions starts again.",
    )


def read_settings(args: Any) -> SlimeSettings:
    """Return the settings in `args` (a Namespace). Where toolroll's own setting is not set, slime's
    option is used. Raise `UsageError` if a setting is unknown or not valid.
    """
    _check_names(args)
    values = {
        name.removeprefix(PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(PREFIX) and value is not None
    }
    engines = attribute(args, "rollout_num_gpus", 1) // max(
        1, attribute(args, "rollout_num_gpus_per_engine", 1)
    )
    return SlimeSettings.read(values, name_of=option_name).filled(
        chat_template_kwargs=attribute(args, "apply_chat_template_kwargs"),
        context_length=attribute(args, "rollout_max_context_len"),
        concurrency=int(attribute(args, "sglang_server_concurrency", 64)) * max(1, int(engines)),
        seed=attribute(args, "rollout_seed"),
    )


def _check_names(args: Any) -> None:
    """Raise `UsageError` for a setting that slime decides, or whose key has hyphens. Warn of a
    setting without the prefix: other code may read it.
    """
    ours = SlimeSettings.model_fields.keys()
    for key, value in vars(args).items():
        hyphens = key.startswith("toolroll-")
        written = key.replace("-", "_") if hyphens else key
        name = written.removeprefix(PREFIX)
        if name == written:
            answered = value is None or option_name(name) in vars(args)
            if name in ours - _NAMES_OF_OTHERS and not answered:
                _warn_without_prefix(name)
        elif value is None and not hyphens:
            continue
        elif name in _DECIDED_BY:
            raise UsageError(f"{key} is not a setting: use slime's {_DECIDED_BY[name]} instead")
        elif name in RunSettings.model_fields.keys() - ours:
            raise UsageError(f"{key} is not a setting: only `toolroll run` has {name}")
        elif hyphens:
            SlimeSettings.check_names([name], name_of=option_name)
            raise UsageError(f"{key} is not a setting; did you mean {written!r}?")


@cache
def _warn_without_prefix(name: str) -> None:
    """Warn once: slime reads the settings again for each sample."""
    option = option_name(name)
    logger.warning(
        "%s has no effect on toolroll: write %s (if other code reads %s, set %s too; the value "
        "null keeps its default)",
        *(name, option, name, option),
    )


def attribute(args: Any, name: str, default: Any = None) -> Any:
    """Return slime's argument `name`, or `default` if it is None or if this version of slime or
    miles does not have it.
    """
    value = vars(args).get(name)
    return default if value is None else value


def check_supported(args: Any, *, evaluation: bool) -> None:
    """Raise `UsageError` for options of slime that toolroll does not support."""
    if attribute(args, "rollout_top_p", 1.0) != 1.0 and not evaluation:
        raise UsageError(
            "--rollout-top-p: slime's loss needs the kept token ids of each nucleus "
            "(rollout_top_p_token_ids). SGLang 0.5.15, which slime runs, returns them only with "
            "slime's patch, in fields of its own, and SGLang 0.5.23 (return_sampling_mask) only "
            "with a finite top_k. toolroll records neither: set it to 1.0"
        )


def rollout_args(args: Any, settings: SlimeSettings) -> RolloutArgs:
    """Return the settings of the model, with the engine's address and the model in `args`."""
    host = attribute(args, "sglang_router_ip", "127.0.0.1")
    port = attribute(args, "sglang_router_port", 30000)
    rollout_args = settings.rollout_args(
        engine=f"http://{host}:{port}", model=attribute(args, "hf_checkpoint")
    ).filled(return_routed_experts=True if experts_shape(args) else None)
    return rollout_args.model_copy(update={"cache_share": settings.cache_share / settings.workers})


def experts_shape(args: Any) -> tuple[int, int] | None:
    """Return (layers, top_k) of the routed experts that the trainer replays, or None if it does
    not. Raise `UsageError` if `args` does not have them.
    """
    if not attribute(args, "use_rollout_routing_replay", False):
        return None
    layers, top_k = attribute(args, "num_layers"), attribute(args, "moe_router_topk")
    if not layers or not top_k:
        raise UsageError(
            "--use-rollout-routing-replay needs the model's num_layers and moe_router_topk: set "
            "them, for example in the file of --custom-config-path"
        )
    return int(layers), int(top_k)


def collects_partial(args: Any) -> bool:
    """Return True if slime keeps aborted samples to continue them in a later rollout."""
    return bool(attribute(args, "partial_rollout", False))


def parks(args: Any, settings: SlimeSettings) -> bool:
    """Return True if an episode is parked after an abort by the trainer."""
    if settings.partial is not None:
        return settings.partial == "park"
    loop = str(attribute(args, "rollout_function_path", ""))
    return collects_partial(args) or loop.startswith("slime.rollout.fully_async_rollout.")


def masks_off_policy(args: Any) -> bool:
    """Return True if slime trains only the tokens that were sampled after the last abort."""
    return collects_partial(args) and bool(
        attribute(args, "mask_offpolicy_in_partial_rollout", False)
    )


def seeded(args: Any, params: Mapping[str, Any], position: int) -> Mapping[str, Any]:
    """Return `params` for the sample at `position` in its group. If SGLang's deterministic
    inference is on, add a sampling seed: slime's seed plus `position`. Without different seeds, all
    samples of a group would be equal.
    """
    if not attribute(args, "sglang_enable_deterministic_inference", False):
        return params
    return {**params, "sampling_seed": int(attribute(args, "rollout_seed", 0)) + position}


def lora_params(args: Any, sample: Any) -> dict[str, str]:
    """Return the parameter that names the LoRA adapter that miles trains. It is empty if miles
    trains none, and for slime. Raise `UsageError` if the sample has an adapter of its own.
    """
    if vars(sample).get("adapter") is not None:
        raise UsageError(
            "a sample names its own adapter (--multi-lora-n-adapters): miles loads new weights "
            "under the same name and needs a cache key for each version, which toolroll does not "
            "send"
        )
    if not (attribute(args, "lora_rank", 0) or attribute(args, "lora_adapter_path")):
        return {}
    lora = import_module("miles.utils.lora")
    return {LORA_PATH: lora.LORA_ADAPTER_NAME} if lora.lora_rollout_enabled(args) else {}


def clean_sampling_params(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return slime's sampling parameters for the engine client, without those that are None or
    affect only the text.
    """
    return {
        name: value
        for name, value in sampling_params.items()
        if value is not None and name not in _TEXT_ONLY
    }
