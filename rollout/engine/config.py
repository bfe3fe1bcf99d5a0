"""`EngineConfig`: how the client talks to an engine or to the router before it."""

from __future__ import annotations

import warnings
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class EngineConfig(BaseModel):
    """Address, time limits (seconds) and retries. `context_length` and `vocab_size` stand in where the engine cannot be asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    connect_timeout: float = Field(10.0, gt=0)
    attempt_timeout: float = Field(1800.0, gt=0, description="one /generate; routers give up after 1800 s themselves")
    deadline: float = Field(3600.0, gt=0, description="one generate with all its attempts")
    attempts: int = Field(6, ge=1)
    backoff: float = Field(0.25, ge=0, description="before the second attempt; doubled from then on")
    backoff_limit: float = Field(10.0, ge=0)
    abort_timeout: float = Field(5.0, gt=0)
    context_length: int | None = Field(None, ge=1)
    vocab_size: int | None = Field(None, ge=1)
    use_http2: bool = False
    return_routed_experts: bool = Field(False, description="MoE; the server needs --enable-return-routed-experts")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        url = value.rstrip("/").removesuffix("/generate")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the engine's address must begin with http:// or https://, not {value!r}")
        return url

    def model_post_init(self, context: Any, /) -> None:
        if self.use_http2:
            warnings.warn(
                "use_http2 has no effect: SGLang's HTTP/1.1 with one shared connection pool is faster",
                UserWarning,
                stacklevel=3,
            )
