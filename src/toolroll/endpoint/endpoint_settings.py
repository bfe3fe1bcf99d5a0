"""`EndpointSettings`: the settings of `toolroll serve`. `SamplingDefaults`: the sampling parameters
that a session or the endpoint sets for requests.

The command's options are generated from these fields. So `toolroll --help` loads this module, which
must not load the HTTP server or numpy.

Invariant: a default of the wrong type or range is refused where it is set, not in later requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.param_names import check_params
from toolroll.rollout.settings import Settings, Verify

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class EndpointSettings(Settings):
    """The settings of the endpoint. Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = Field(default=8400, ge=0, le=65535, description="0: any free port.")
    api_key: str | None = Field(
        default=None, min_length=8, description="Required if host is not a loopback address."
    )
    sampling_params: dict[str, Any] = Field(
        default_factory=dict,
        description="Defaults for sampling parameters that a request does not set, by SGLang's "
        "names.",
    )
    server_tools: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="If a request offers a tool that cannot be served, such as web_search, which "
        "runs on the provider's servers: refuse the request (refuse), or answer without that tool "
        "(drop).",
    )
    verify: Verify = "sample"
    grace: float = Field(
        default=30.0,
        ge=0,
        description="Seconds for which a request continues after its client has disconnected.",
    )
    """It is also the time for which an answer is kept for a retry."""
    timeout: float = Field(
        default=1800.0,
        gt=0,
        description="Time limit of one request with all its answers; it does not count while the "
        "request is held back or the engine is down.",
    )
    idle: float = Field(
        default=3600.0, gt=0, description="Seconds after which an unused session is dropped."
    )
    require_session: bool = Field(default=False, description="Refuse requests without a session.")
    max_sessions: int = Field(default=10_000, ge=1, description="Limit of open sessions.")
    max_nodes: int = Field(default=20_000, ge=1, description="Limit of nodes in a session's tree.")
    max_in_flight: int = Field(
        default=256, ge=1, description="Limit of concurrent requests of one session."
    )
    max_choices: int = Field(default=64, ge=1, description="The largest n.")
    max_body: int = Field(
        default=32 * 2**20,
        ge=1024,
        description="Limit of one request's body in bytes, decompressed.",
    )
    max_text: int = Field(
        default=2**20,
        ge=1024,
        description="Limit of one text in a request, in bytes: a message, a tool result, a prompt.",
    )
    max_items: int = Field(
        default=2**18,
        ge=1024,
        description="Limit of the names and values in one request's JSON (a prompt of token ids "
        "has one for each id).",
    )
    receive: float = Field(
        default=60.0,
        gt=0,
        description="Time limit for receiving a request, and for keeping an idle connection open.",
    )

    @field_validator("sampling_params")
    @classmethod
    def _known(cls, params: dict[str, Any]) -> dict[str, Any]:
        from toolroll.endpoint.errors import refusal_of

        if "n" in params:
            raise ValueError("n is set by each request")
        try:
            return sampling_defaults(params)
        except UsageError as error:
            raise ValueError(str(error)) from error
        except ValidationError as error:
            raise ValueError(str(refusal_of(error))) from error

    @model_validator(mode="after")
    def _keyed(self) -> EndpointSettings:
        if self.host not in LOOPBACK and not self.api_key:
            raise ValueError(
                f"other machines can reach {self.host}: an endpoint there needs an api_key "
                f"(--api-key-env)"
            )
        return self


# --- sampling parameters --------------------------------------------------------------------------


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


class SameNames(BaseModel):
    """The sampling parameters that have the same name in a request and in SGLang."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None


class SamplingDefaults(SameNames):
    """The defaults, with SGLang's names and types. `n` is missing, because each request sets it."""

    model_config = ConfigDict(extra="allow")  # `check_names` has seen the names

    max_new_tokens: Count | None = None
    min_new_tokens: Size | None = None
    stop: Stops = None
    stop_regex: Texts | None = None
    top_k: int | None = Field(default=None, ge=-1)
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: Count | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: Count | None = None
    watermark: Any = None
    choice: Any = None
    lora_path: str | None = Field(default=None, min_length=1)


def sampling_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated `params`. Leave out values that are None. Raise `UsageError` for a
    misspelled name or a text instead of a number, and pydantic's `ValidationError` for other values
    that are not valid.
    """
    defaults = SamplingDefaults.model_validate(dict(params)).model_dump(exclude_none=True)
    check_params(params)
    if "logit_bias" in defaults:
        defaults["logit_bias"] = {
            str(index): bias for index, bias in defaults["logit_bias"].items()
        }
    return defaults
