"""`SamplingDefaults`: the sampling parameters that a session or the endpoint sets for requests.

Invariant: a value of the wrong type or range is refused where it is set, not in later requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

T = TypeVar("T")


def _no_empty(stop: T) -> T:
    """Refuse an empty stop string: every text contains it."""
    if stop == "" or (isinstance(stop, list) and "" in stop):
        raise PydanticCustomError("empty_stop", "a stop string must not be empty")
    return stop


Stops = Annotated[str | list[str] | None, AfterValidator(_no_empty)]
StopList = Annotated[list[str] | None, AfterValidator(_no_empty)]
Texts = str | list[str]
Size = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class SamplingDefaults(BaseModel):
    """The defaults, with SGLang's names and types. `n` is missing, because each request sets it."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Count | None = None
    min_new_tokens: Size | None = None
    stop: Stops = None
    stop_token_ids: list[int] | None = None
    stop_regex: Texts | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: Count | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: Count | None = None
    watermark: Any = None
    choice: Any = None
    lora_path: str | None = Field(default=None, min_length=1)


def sampling_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated `params`. Leave out values that are None. Raise pydantic's
    `ValidationError` if a value is not valid.
    """
    defaults = SamplingDefaults.model_validate(dict(params)).model_dump(exclude_none=True)
    if "logit_bias" in defaults:
        defaults["logit_bias"] = {
            str(index): bias for index, bias in defaults["logit_bias"].items()
        }
    return defaults
