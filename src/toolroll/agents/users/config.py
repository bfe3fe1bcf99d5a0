"""`UserConfig`: the model that plays the user, and how it samples."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from toolroll.agents.chat_client import ChatClientConfig
from toolroll.agents.users.strategies import UserStrategy

SYSTEM_PROMPT = """Play the part of a person who writes to a service desk. You are never the desk, and never an assistant.

Who you are and what you want:
{instruction}

How you write:
- One short message at a time, in plain words, without quoting the lines above.
- Begin with your main request. Give a detail when you are asked for it, not before.
- If you are asked for something that the lines above do not say, answer that you do not know.
- Stay with what you want; do not agree to something else unless the lines above allow it.
- As soon as everything is settled, or it is clear that it cannot be, or you are handed to another person, answer with
  ###STOP### and nothing else.
"""  # noqa: E501


class UserConfig(ChatClientConfig):
    """The address and sampling parameters of the model that plays the user. Times are in
    seconds.
    """

    system_prompt: str = SYSTEM_PROMPT
    """The task's instruction replaces `{instruction}`."""
    strategy: UserStrategy = "llm"
    """How the model writes its lines; see `toolroll.agents.users.strategies`."""
    revisions: int = Field(default=2, ge=0)
    """How many lines in a row the supervisor of `verify` and `reflection` may refuse. The next line
    is sent without its approval.
    """
    first_agent_line: str = "Hi! How can I help you today?"
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    seed: int | None = None
    timeout: float = Field(default=60.0, gt=0)
    """The time limit of one attempt."""
    max_backoff: float = Field(default=30.0, ge=0)
    max_concurrency: int | None = Field(default=64, gt=0)
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further request fields, such as {"chat_template_kwargs": {"enable_thinking": false}}."""

    @field_validator("system_prompt")
    @classmethod
    def _check_prompt(cls, value: str) -> str:
        if "{instruction}" not in value:
            raise ValueError(
                "must contain the placeholder {instruction}, which the task's instruction replaces"
            )
        return value

    @field_validator("extra_body")
    @classmethod
    def _check_extra(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({"messages", "model", "stream", "n", "tools"} & set(value))
        if taken:
            raise ValueError(f"must not set {', '.join(taken)}")
        return value

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are set, and the fields of `extra_body`. The config's seed
        is not included.
        """
        optional = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens")}
        given = {name: value for name, value in optional.items() if value is not None}
        return {**given, **self.extra_body}
