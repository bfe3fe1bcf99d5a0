"""`EngineConfig`: how to reach an engine or the router in front of it."""

from __future__ import annotations

import warnings
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from yarl import URL

from toolroll.rollout.engine.address import split_credentials


class EngineConfig(BaseModel):
    """The address of an engine or router, with time limits (in seconds) and retries.

    A user and password in `url` are moved to `authorization`, because error messages contain `url`.
    `context_length` and `vocab_size` take precedence over the values that the engine reports.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str
    authorization: SecretStr | None = Field(
        default=None, description="the Authorization header, sent with every request to `url`"
    )
    connect_timeout: float = Field(default=10.0, gt=0)
    attempt_timeout: float = Field(
        default=1800.0, gt=0, description="time limit of one attempt; routers use 1800 s too"
    )
    deadline: float = Field(default=3600.0, gt=0, description="time limit of all attempts together")
    attempts: int = Field(default=6, ge=1)
    backoff: float = Field(
        default=0.25,
        ge=0,
        description="pause before the second attempt; it doubles up to `backoff_limit`",
    )
    backoff_limit: float = Field(default=10.0, ge=0)
    abort_timeout: float = Field(default=5.0, gt=0)
    engine_timeout: float = Field(
        default=0.0,
        ge=0,
        description=(
            "how long to wait for an engine that does not answer at all; with 0, a request fails "
            "after `attempts` (only the caller knows whether the engine will be restarted)"
        ),
    )
    context_length: int | None = Field(default=None, ge=1)
    vocab_size: int | None = Field(default=None, ge=1)
    allow_model_mismatch: bool = Field(
        default=False,
        description="only warn, and do not fail, if the engine no longer serves the same model",
    )
    use_http2: bool = False
    return_routed_experts: bool = Field(
        default=False,
        description="return the experts of each token of an MoE model; SGLang needs "
        "--enable-return-routed-experts",
    )

    @model_validator(mode="before")
    @classmethod
    def _credentials(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("url"), str):
            return data
        url, authorization = split_credentials(data["url"])
        return {**data, "url": url} | ({"authorization": authorization} if authorization else {})

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        url = value.rstrip("/").removesuffix("/generate")
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"the engine's address must begin with http:// or https://, not {value!r}"
            )
        try:
            host = URL(url).raw_host or ""
            host.encode("idna")
        except ValueError as error:
            raise ValueError(f"the engine's address {value!r} is not valid: {error}") from error
        if url.endswith("/v1"):
            raise ValueError(
                f"{value!r} is an OpenAI-compatible address; give the engine's own, without /v1: "
                f"{url.removesuffix('/v1')}"
            )
        if not host:
            raise ValueError(f"the engine's address {value!r} has no host")
        return url

    def model_post_init(self, context: Any, /) -> None:
        if self.use_http2:
            warnings.warn(
                "use_http2 has no effect: HTTP/1.1 with one shared connection pool is faster with "
                "SGLang",
                UserWarning,
                stacklevel=3,
            )
