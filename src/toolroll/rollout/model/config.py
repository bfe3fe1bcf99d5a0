"""`RolloutArgs`: the address of the engine and the settings of its model.

`read_args` reads them from a mapping or from a trainer's Namespace. Some fields have the names that
slime's tau-bench example uses: `sglang_router_ip`, `sglang_router_port`, `use_http2` and
`hf_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import complaints


class ModelSettings(BaseModel):
    """The settings of a served model that `RolloutArgs` and the adapters share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_call_parser: str = Field(
        default="auto",
        description="a name of SGLang's --tool-call-parser; auto: the parser for the tool calls "
        "that the chat template writes",
    )
    chat_template: str | None = Field(
        default=None, description="a Jinja file, or Jinja text, instead of the tokenizer's template"
    )
    context_length: int | None = Field(
        default=None,
        ge=1,
        description="the model's context length in tokens; default: what the engine reports",
    )
    history: Literal["fork", "preserve"] = Field(
        default="fork",
        description="if the chat template renders earlier turns differently than before: start a "
        "new sequence (fork), or keep the tokens that were sent (preserve)",
    )
    verify: Literal["off", "sample", "always"] = Field(
        default="sample",
        description="when the recorded tokens are checked: never (off), when an episode has ended "
        "(sample), or also after every turn (always)",
    )
    max_observation_bytes: int = Field(
        default=1_000_000,
        ge=1,
        description="limit in bytes for the text that one reset or step returns; more text is a "
        "failure of the environment",
    )
    engine_timeout: float = Field(
        default=0.0,
        ge=0,
        description="seconds to wait for an engine that does not answer at all; 0: fail after the "
        "retries, as a trainer that restarts its engines expects (`toolroll run` waits 600 s)",
    )
    max_resumes: int = Field(
        default=0,
        ge=0,
        description="maximum number of times that one turn is resumed after the engine aborted it "
        "(for a weight update); 0: the episode is aborted, as trainers expect (`toolroll run` "
        "resumes a turn up to 3 times)",
    )
    pace_gc: bool = Field(
        default=True,
        description="run Python's garbage collector less often while the model is open",
    )
    allow_model_mismatch: bool = Field(
        default=False, description="only warn if the engine serves a model with another tokenizer"
    )


class RolloutArgs(ModelSettings):
    """The settings of one served model. Fields that slime's tau-bench example also has keep its
    defaults.
    """

    sglang_router_ip: str = "127.0.0.1"
    sglang_router_port: int = Field(default=30000, ge=1, le=65535)
    engine_url: str | None = Field(
        default=None,
        description="the engine's URL, instead of sglang_router_ip and sglang_router_port",
    )
    use_http2: bool = False
    hf_checkpoint: str | None = Field(default=None, description="folder or name of the tokenizer")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template"
    )
    return_routed_experts: bool = Field(
        default=False, description="return the experts of each token of an MoE model"
    )
    concurrency: int = Field(default=64, ge=1, description="number of concurrent episodes")

    @property
    def url(self) -> str:
        """The address of the engine."""
        return self.engine_url or f"http://{self.sglang_router_ip}:{self.sglang_router_port}"


def read_args(value: Any) -> RolloutArgs:
    """Return `value` as `RolloutArgs`.

    `value` is None, a mapping, a `RolloutArgs`, or a Namespace (or another object with attributes).
    All keys of a mapping must be fields of `RolloutArgs`. A Namespace may have other attributes,
    which are ignored. Raise `UsageError` if a value is not valid.
    """
    if isinstance(value, RolloutArgs):
        return value
    if value is None:
        return RolloutArgs()
    given = dict(value) if isinstance(value, Mapping) else _known(vars(value))
    try:
        return RolloutArgs.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"rollout_args: {complaints(error)}") from error


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a trainer's Namespace that are fields of `RolloutArgs` and are not
    None.
    """
    return {
        name: attributes[name]
        for name in RolloutArgs.model_fields
        if attributes.get(name) is not None
    }
