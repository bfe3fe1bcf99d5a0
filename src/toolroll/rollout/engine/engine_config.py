"""`EngineConfig`: how to reach an engine or the router in front of it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SecretStr, model_validator

from toolroll.rollout.settings import (
    EngineAddress,
    EngineSettings,
    RoutedExperts,
    split_credentials,
)


class EngineConfig(EngineSettings):
    """The address of an engine or router, with time limits (in seconds) and retries.

    A user and password in `engine` are moved to `authorization`, because error messages contain the
    address. `context_length` and `vocab_size` take precedence over the values that the engine
    reports.
    """

    engine: EngineAddress
    authorization: SecretStr | None = Field(
        default=None, description="The Authorization header, sent with every request to `engine`."
    )
    connect_timeout: float = Field(default=10.0, gt=0)
    attempt_timeout: float = Field(
        default=1800.0, gt=0, description="Time limit of one attempt; routers use 1800 s too."
    )
    deadline: float = Field(
        default=3600.0, gt=0, description="Time limit of all attempts together."
    )
    retries: int = Field(default=5, ge=0, description="How often to send a failed request again.")
    backoff: float = Field(
        default=0.25,
        ge=0,
        description="Pause before the first retry; it doubles up to `max_backoff`.",
    )
    max_backoff: float = Field(default=10.0, ge=0)
    abort_timeout: float = Field(default=5.0, gt=0)
    vocab_size: int | None = Field(default=None, ge=1)
    return_routed_experts: RoutedExperts = False

    @model_validator(mode="before")
    @classmethod
    def _credentials(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("engine"), str):
            return data
        url, authorization = split_credentials(data["engine"])
        return {**data, "engine": url} | ({"authorization": authorization} if authorization else {})
