"""`EndpointSettings`: the settings of `toolroll serve`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from toolroll.rollout.engine.sampling_params import check_names
from toolroll.rollout.errors import UsageError
from toolroll.rollout.server.protocol import refusal_of
from toolroll.rollout.server.sampling_defaults import sampling_defaults

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class EndpointSettings(BaseModel):
    """The settings of the endpoint. Times are in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8400, ge=0, le=65535, description="0: any free one")
    api_key: str | None = Field(
        default=None, min_length=8, description="required if host is not a loopback address"
    )
    sampling_params: dict[str, Any] = Field(
        default_factory=dict,
        description="default sampling parameters (SGLang's names), if a request does not set them",
    )
    default_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="max_tokens for requests that do not set it; default: the rest of the context",
    )
    cut_first_prompt: bool = Field(
        default=False,
        description="if the first prompt of a conversation leaves no room for the default number "
        "of new tokens (the session's max_new_tokens, else default_max_tokens), drop the prompt's "
        "first tokens, as OpenRLHF does, instead of refusing the request",
    )
    openrlhf_token_ids: bool = Field(
        default=False,
        description="also answer with OpenRLHF's `token_ids`: {prompt_token_ids, "
        "completion_token_ids}",
    )
    model_names: Literal["any", "own"] = Field(
        default="any", description="whether a request may name any model, or only the served one"
    )
    seed: Literal["refuse", "best_effort"] = Field(
        default="best_effort",
        description="if the engine is not deterministic: refuse a seed, or send it anyway",
    )
    server_tools: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="if a request offers a tool of the provider's servers, such as web_search: "
        "refuse the request, or answer it without that tool",
    )
    verify: Literal["off", "sample", "always"] = "sample"
    grace: float = Field(
        default=30.0,
        ge=0,
        description="how long a request continues after its client disconnected, and how long an "
        "answer is kept for a retry",
    )
    timeout: float = Field(
        default=1800.0, gt=0, description="time limit of one request with all its answers"
    )
    idle: float = Field(
        default=3600.0, gt=0, description="time after which an unused session is dropped"
    )
    max_sessions: int = Field(default=10_000, ge=1)
    max_nodes: int = Field(default=20_000, ge=1, description="limit of nodes in a session's tree")
    max_in_flight: int = Field(
        default=256, ge=1, description="limit of concurrent requests of one session"
    )
    max_choices: int = Field(default=64, ge=1, description="the largest n")
    max_body: int = Field(
        default=32 * 2**20, ge=1024, description="limit of one request's body, decompressed"
    )
    max_text: int = Field(
        default=2**20,
        ge=1024,
        description="limit of one text in a body: a message, a tool result, a prompt",
    )
    receive: float = Field(
        default=60.0,
        gt=0,
        description="time limit for receiving a request, and for keeping an idle connection open",
    )

    @field_validator("sampling_params")
    @classmethod
    def _known(cls, params: dict[str, Any]) -> dict[str, Any]:
        if "n" in params:
            raise ValueError("n is set by each request")
        try:
            check_names(params)
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
